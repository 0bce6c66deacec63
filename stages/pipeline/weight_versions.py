"""Weight versions: the replicas of a stage's module that the program needs, and the master copy.

Each replica is an ordinary module whose parameters are views of one flat buffer, so forward and backward of a
version run on the replica that holds it, and autograd's own version check catches a buffer that is
overwritten too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version

from stages.config import ModelConfig
from stages.model.custom import make_stage
from stages.model.decoder import Stage, initialise
from stages.model.moe.routing import Routing
from stages.model.partition import StageCut
from stages.model.stacks import member_names, member_shape
from stages.pipeline.flat_buffers import GradientBuffer, Master, flat_views, members_of
from stages.update.optimizer_sharding import share_out
from stages.update.reduction_rounds import reduction_plan

EMPTY = -1
"""The version of a replica that has not been written."""


class Replica:
    """One module of the stage, the weight version that it holds, and the backwards that need it."""

    def __init__(self, module: Stage, flat: Tensor, parameters: list[nn.Parameter], *, version: int) -> None:
        self.module = module
        self.flat = flat
        self.parameters = parameters
        self.members = [member for parameter in parameters for member in members_of(parameter)]
        self.version = version
        self.biases = flat.new_zeros((len(module.expert_blocks), module.config.experts), dtype=torch.float32)
        """Balance biases of the version, `(blocks of experts, experts)`. Replaced, never written in place:
        recomputation reads those that the forward read."""
        self.pending_backwards = 0

    def routing(self) -> Routing:
        """For one micro-batch that runs on this replica."""
        if self.biases.is_cuda:
            # They may be replaced, on another stream, while a backward that recomputes has yet to read them.
            self.biases.record_stream(torch.cuda.current_stream(self.biases.device))
        return Routing(dict(zip(self.module.expert_blocks, self.biases.unbind(), strict=True)))

    def named_biases(self) -> dict[str, Tensor]:
        """The balance biases by name, as in `blocks.3.experts.bias`."""
        names = [f"blocks.{block}.experts.bias" for block in self.module.expert_blocks]
        return dict(zip(names, self.biases.unbind(), strict=True))

    @property
    def writes(self) -> int:
        """Autograd's count of writes to the flat buffer of its weights."""
        return self.parameters[0]._version


class WeightVersions:
    """The weights of one stage: master copy, replicas, gradient buffers.

    Every data rank has whole replicas and gradients, and a master copy of the members of parameters that it
    owns. Flat buffers are laid out as `stages.update.optimizer_sharding` says.

    Args:
        config: the model.
        cut: what the stage holds.
        context: tokens in a sequence.
        replicas: how many weight versions the program needs at this stage.
        gradient_buffers: 2 where backwards of the next step run before an update has been applied, else 1.
        master_dtype: of the master copy and of the gradients.
        replica_dtype: of the weights that forward and backward compute with.
        version: version number of the initial weights. With several data ranks each draws the members it
            owns; the first replica holds this version after `completing_initial`.
        data_rank: which replica of the pipeline this is.
        data_ranks: how many there are.
    """

    def __init__(
        self,
        config: ModelConfig,
        cut: StageCut,
        *,
        context: int,
        seed: int,
        replicas: int,
        gradient_buffers: int,
        master_dtype: torch.dtype,
        replica_dtype: torch.dtype,
        device: torch.device,
        version: int = 0,
        data_rank: int = 0,
        data_ranks: int = 1,
    ) -> None:
        with torch.device("meta"):
            shapes = {
                name: tuple(p.shape)
                for name, p in make_stage(config, cut, context=context).named_parameters()
            }
        self.shapes = shapes
        """Of the parameters, by name."""
        self.names = list(shapes)
        self.sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        """Number of values of each parameter."""
        self.ownership = share_out(list(shapes.values()), data_ranks=data_ranks)
        self.owned = self.ownership.owned[data_rank]
        """Numbers of the members that this data rank updates."""
        self.reduction = reduction_plan(self.sizes, self.ownership, number_bytes=master_dtype.itemsize)
        """How the gradient is added over the data ranks."""
        self.replicas = [
            self._module(config, cut, context=context, dtype=replica_dtype, device=device)
            for _ in range(replicas)
        ]
        self.gradients = [
            GradientBuffer(
                *self._flat(dtype=master_dtype, device=device),
                runs=self.ownership.runs[data_rank],
                owned=self.owned,
                loads=torch.zeros_like(self.replicas[0].biases, dtype=torch.int64),
            )
            for _ in range(gradient_buffers)
        ]
        self._gathering = 0
        members = [
            (name, member_shape(shape), parameter)
            for parameter, shape in shapes.items()
            for name in member_names(parameter, shape)
        ]
        self.member_names = [name for name, _, _ in members]
        """Of all members of the parameters."""
        own_members = [members[number] for number in self.owned]
        self.parameter_of = {name: parameter for name, _, parameter in own_members}
        """The name of the parameter that a member is of, for each member that this data rank owns."""
        _, masters = flat_views([shape for _, shape, _ in own_members], dtype=master_dtype, device=device)
        self.master = Master([name for name, _, _ in own_members], [nn.Parameter(view) for view in masters])
        self._begin_with(lambda name, weight: initialise(weight, name=name, seed=seed, layers=config.layers))
        self._initial_version = version
        self._data_rank = data_rank
        if data_ranks == 1:
            self.replicas[0].version = version
        self._point_gradients()

    def start_from(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the drawn weights of the members that this data rank owns, by name, and balance biases."""
        self._begin_with(lambda name, weight: weight.copy_(weights[name]))
        first = self.replicas[0]
        biases = [weights.get(name, bias).to(bias) for name, bias in first.named_biases().items()]
        if biases:
            first.biases = torch.stack(biases)

    @torch.no_grad()
    def _begin_with(self, write: Callable[[str, Tensor], object]) -> None:
        """Let `write` fill the master copy of every owned member, and round the first replica from it."""
        owned = self.owned_of(self.replicas[0])
        for name, weight, target in zip(self.master.names, self.master.parameters, owned, strict=True):
            write(name, weight)
            target.copy_(weight)

    @contextmanager
    def completing_initial(self) -> Iterator[None]:
        """In this block the members that other data ranks own are written into the first replica."""
        with self.completing(self.replicas[0], version=self._initial_version):
            yield

    def flat(self, *, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """A new flat buffer of the stage on its device, zero, and a view of it for each parameter."""
        return self._flat(dtype=dtype, device=self.gradients[0].flat.device)

    def _flat(self, *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        in_model_order = list(self.shapes.values())
        shapes = [in_model_order[parameter] for parameter in self.ownership.order]
        flat, in_order = flat_views(shapes, dtype=dtype, device=device)
        views = dict(zip(self.ownership.order, in_order, strict=True))
        return flat, [views[parameter] for parameter in range(len(views))]

    def _module(
        self, config: ModelConfig, cut: StageCut, *, context: int, dtype: torch.dtype, device: torch.device
    ) -> Replica:
        with torch.device("meta"):
            module = make_stage(config, cut, context=context)
        flat, views = self._flat(dtype=dtype, device=device)
        parameters = []
        for name, view in zip(self.names, views, strict=True):
            owner_name, _, leaf = name.rpartition(".")
            parameter = nn.Parameter(view)
            setattr(module.get_submodule(owner_name), leaf, parameter)
            parameters.append(parameter)
        module.prepare(device=device, dtype=dtype)
        return Replica(module, flat, parameters, version=EMPTY)

    @property
    def gathering(self) -> GradientBuffer:
        """The buffer into which backwards accumulate now."""
        return self.gradients[self._gathering]

    def holding(self, version: int) -> Replica:
        """The replica that holds `version`.

        Raises:
            RuntimeError: none does: the program reads a version before it is written or after it is
                overwritten.
        """
        for replica in self.replicas:
            if replica.version == version:
                return replica
        held = sorted(replica.version for replica in self.replicas)
        raise RuntimeError(f"the program reads version {version}, this stage holds {held}")

    def newest(self) -> Replica:
        """The replica of the newest version."""
        return max(self.replicas, key=lambda replica: replica.version)

    def oldest(self) -> Replica:
        """The replica that the next version is written into."""
        return min(self.replicas, key=lambda replica: replica.version)

    def take_gradient(self) -> GradientBuffer:
        """Hand the gathered gradient to the update; later backwards accumulate into the next buffer.

        The master parameters' `grad` are views of the buffer that is handed over.
        """
        taken = self.gathering
        for parameter, view in zip(self.master.parameters, taken.owned_views, strict=True):
            parameter.grad = view
        if len(self.gradients) > 1:
            self._gathering = (self._gathering + 1) % len(self.gradients)
            self._point_gradients()
        return taken

    def _point_gradients(self) -> None:
        # Autograd adds into an existing .grad in place, so all replicas gather into one buffer without a
        # copy.
        for replica in self.replicas:
            for parameter, view in zip(replica.parameters, self.gathering.views, strict=True):
                if parameter.dtype != view.dtype:
                    parameter.grad_dtype = view.dtype
                parameter.grad = view

    def own_biases(self, replica: Replica) -> dict[str, Tensor]:
        """The balance biases of a replica, which data rank 0 saves for all, by name."""
        return replica.named_biases() if self._data_rank == 0 else {}

    def owned_of(self, replica: Replica) -> list[Tensor]:
        """The members of a replica's parameters that this data rank owns."""
        return [replica.members[number] for number in self.owned]

    @contextmanager
    def rewriting(self, *, version: int, biases: Tensor) -> Iterator[Sequence[Tensor]]:
        """Give out the members of the oldest replica that this data rank owns, to be overwritten.

        Afterwards the replica holds `version`, with these balance biases; or none until `completing`, where
        others own the rest.
        """
        replica = self.oldest()
        replica.biases = biases
        with self._writing(replica):
            yield self.owned_of(replica)
        whole = len(self.owned) == len(self.member_names)
        replica.version = version if whole else EMPTY

    @contextmanager
    def completing(self, replica: Replica, *, version: int) -> Iterator[None]:
        """Let the parts that other data ranks own be written in this block; afterwards `replica` holds
        `version`."""
        with self._writing(replica):
            yield
            # What comes from other processes is not written by torch, so autograd would not see it.
            if len(self.replicas) > 1:
                increment_version(replica.flat)
        replica.version = version

    @contextmanager
    def _writing(self, replica: Replica) -> Iterator[None]:
        with torch.no_grad():
            # Only where there is one replica may the program write under a backward; elsewhere autograd must
            # object.
            if replica.pending_backwards and len(self.replicas) == 1:
                with writing_under_pending_backward(replica.parameters):
                    yield
            else:
                yield


@contextmanager
def writing_under_pending_backward(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let in-place writes to `parameters` pass autograd's version check: only an unstashed schedule may.

    Backwards that wait then read the new values. Torch offers this under a private name only; it is used here
    and nowhere else.
    """
    with _unsafe_preserve_version_counter(cast("tuple[Tensor, ...]", tuple(parameters))):
        yield
