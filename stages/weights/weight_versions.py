"""The weight versions of a stage: one replica of its module per version in use, and the master copy.

Each replica is an ordinary module whose parameters are views of one flat buffer, so forward and backward of a
version run on the replica that holds it, and autograd's own version check catches a buffer that is
overwritten too early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version

from stages.comm.collectives import Exchange, Group, Reduction
from stages.comm.reduction_rounds import reduction_plan
from stages.config.run_config import RunConfig
from stages.model.custom import make_stage
from stages.model.decoder import Stage, initialise
from stages.model.experts import Routing
from stages.shape.head import whole_name
from stages.shape.optimizer_sharding import assign_owners
from stages.shape.partition import StageCut
from stages.shape.spec import member_names, member_shape
from stages.weights.flat_buffers import GradientBuffer, Master, flat_views, members_of
from stages.weights.number_formats import dtypes

EMPTY = -1
"""The version of a replica that has not been written."""
INITIAL = 0
"""The version of the initial weights."""


class Replica:
    """A copy of the stage's module that holds one weight version, and how many backwards still read it."""

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
        """The routing of one micro-batch on this replica."""
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
    owns. Flat buffers are laid out as `stages.shape.optimizer_sharding` says.

    Args:
        config: of the run. With several data ranks each draws the members it owns, from `seed`; the first
            replica holds version 0 after `receiving_initial`. Under `parallel.shard_gradients` a second
            gradient buffer has only the members that this data rank owns.
        cut: what the stage holds.
        replicas: number of weight versions that the program needs at this stage.
        gradient_buffers: 1, or 2 where backwards of the next step run before an update has been applied.
        device: holds master copy, replicas and gradients.
        data_rank: this data rank.
        data_ranks: number of data ranks.
    """

    reduces_early = True
    """Whether the sum over data ranks may begin within the last backward."""
    is_sharded = False
    """Whether torch's `fully_shard` holds the weights, as in `ShardedWeights`."""

    def __init__(
        self,
        config: RunConfig,
        cut: StageCut,
        *,
        replicas: int,
        gradient_buffers: int,
        device: torch.device,
        data_rank: int = 0,
        data_ranks: int = 1,
    ) -> None:
        self._device, types = device, dtypes(config)
        with torch.device("meta"):
            module = make_stage(config.model, cut, context=config.data.context)
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        self.shapes = shapes
        """Shapes of the parameters, by name."""
        self.names = list(shapes)
        self.sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        """Number of values of each parameter."""
        self.ownership = assign_owners(list(shapes.values()), data_ranks=data_ranks)
        self.owned = self.ownership.owned[data_rank]
        """Indices of the members that this data rank updates."""
        self.reduction = reduction_plan(self.sizes, self.ownership, number_bytes=types.master.itemsize)
        """The rounds in which the gradient is summed over the data ranks."""
        self.replicas = [self._module(config, cut, dtype=types.replica) for _ in range(replicas)]
        members = [
            (name, member_shape(shape), parameter)
            for parameter, shape in shapes.items()
            for name in member_names(parameter, shape)
        ]
        self.member_names = [name for name, _, _ in members]
        """Names of all members of the parameters."""
        own_members = [members[number] for number in self.owned]
        self.parameter_of = {name: parameter for name, _, parameter in own_members}
        """For each member that this data rank owns, the name of its parameter."""
        own_shapes = [shape for _, shape, _ in own_members]
        whole = part = None
        if config.parallel.shard_gradients and gradient_buffers > 1:
            whole = self.flat(dtype=types.master)
            part = flat_views(own_shapes, dtype=types.master, device=device)
        self.gradients = [
            GradientBuffer(
                *(whole or self.flat(dtype=types.master)),
                part=part,
                runs=self.ownership.runs[data_rank],
                owned=self.owned,
                loads=torch.zeros_like(self.replicas[0].biases, dtype=torch.int64),
            )
            for _ in range(gradient_buffers)
        ]
        self._current = 0
        _, masters = flat_views(own_shapes, dtype=types.master, device=device)
        self.master = Master([name for name, _, _ in own_members], [nn.Parameter(view) for view in masters])
        self._rows = cut.head_rows

        def draw(name: str, weight: Tensor) -> None:
            initialise(weight, name=name, seed=config.seed, model=config.model)

        def draw_rows(name: str, weight: Tensor) -> None:
            # The generator gives the same rows only in a draw of the whole matrix.
            whole = torch.empty((config.model.vocab_size, config.model.width), dtype=torch.float32)
            draw(whole_name(name), whole)
            weight.copy_(self._own_rows(whole))

        self._fill(draw if cut.head_rows is None else draw_rows)
        self._data_rank = data_rank
        if data_ranks == 1:
            self.replicas[0].version = INITIAL
        self._point_gradients()

    def reduce(self, data: Group, gradient: GradientBuffer, *, early: bool) -> Reduction:
        """Prepare the sum of a gradient over the data ranks; arguments as for `Group.reduce_scatter`."""
        return data.reduce_scatter(gradient.flat, self.reduction, early=early, part=gradient.part)

    def hand_out(self, data: Group, replica: Replica) -> Exchange[None]:
        """Send the members of a replica that this data rank owns to the others, and receive theirs."""
        return data.broadcast(replica.flat, self.ownership.runs)

    def before_backward(self, *, last: bool) -> None:
        """Called before each backward; `last`: of an update."""

    def saves(self, name: str) -> bool:
        """Whether this data rank saves a member that it owns: no other does."""
        return True

    def version_targets(self, replica: Replica, version: int) -> dict[str, Tensor]:
        """Where a version's tensors in a checkpoint are read to, by key."""
        named = dict(zip(self.member_names, replica.members, strict=True)) | replica.named_biases()
        return {f"version/{version}/{name}": tensor.detach() for name, tensor in named.items()}

    @property
    def room_bytes(self) -> int:
        """Bytes of buffers beside weights and gradients."""
        return 0

    def hide(self) -> None:
        """End an evaluation."""

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the members that this data rank owns, by name, as a run's result has them."""
        return dict(tensors)

    def load_initial(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the drawn weights of the members that this data rank owns, by name, and balance biases. A
        shard of the head takes its rows of the whole matrix.
        """
        self._fill(lambda name, weight: weight.copy_(self._own_rows(weights[whole_name(name)])))
        self._load_biases(weights)

    def _load_biases(self, weights: Mapping[str, Tensor]) -> None:
        first = self.replicas[0]
        biases = [weights.get(name, bias).to(bias) for name, bias in first.named_biases().items()]
        if biases:
            first.biases = torch.stack(biases)

    def _own_rows(self, whole: Tensor) -> Tensor:
        """The rows that a shard of the head holds of the matrix; of other stages' parameters all."""
        return whole if self._rows is None else whole[self._rows.start : self._rows.stop]

    @torch.no_grad()
    def _fill(self, write: Callable[[str, Tensor], object]) -> None:
        """Fill the master copy of every owned member with `write`, and round it into the first replica."""
        owned = self.owned_members(self.replicas[0])
        for name, weight, target in zip(self.master.names, self.master.parameters, owned, strict=True):
            write(name, weight)
            target.copy_(weight)

    @contextmanager
    def receiving_initial(self) -> Iterator[None]:
        """A block in which the members that other data ranks own are written into the first replica."""
        with self.receiving_others(self.replicas[0], version=INITIAL):
            yield

    def flat(self, *, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """A new zeroed flat buffer on the stage's device, with a view for each parameter."""
        in_model_order = list(self.shapes.values())
        shapes = [in_model_order[parameter] for parameter in self.ownership.order]
        flat, in_order = flat_views(shapes, dtype=dtype, device=self._device)
        views = dict(zip(self.ownership.order, in_order, strict=True))
        return flat, [views[parameter] for parameter in range(len(views))]

    def _module(self, config: RunConfig, cut: StageCut, *, dtype: torch.dtype) -> Replica:
        with torch.device("meta"):
            module = make_stage(config.model, cut, context=config.data.context)
        flat, views = self.flat(dtype=dtype)
        parameters = []
        for name, view in zip(self.names, views, strict=True):
            owner_name, _, leaf = name.rpartition(".")
            parameter = nn.Parameter(view)
            setattr(module.get_submodule(owner_name), leaf, parameter)
            parameters.append(parameter)
        module.prepare(device=self._device, dtype=dtype)
        return Replica(module, flat, parameters, version=EMPTY)

    @property
    def gradient_buffer(self) -> GradientBuffer:
        """The buffer that backwards accumulate into now."""
        return self.gradients[self._current]

    @property
    def current_buffer(self) -> int:
        """Number of the buffer that backwards accumulate into now."""
        return self._current

    @contextmanager
    def adding_to(self, buffer: int) -> Iterator[None]:
        """A block whose backwards accumulate into another buffer."""
        before, self._current = self._current, buffer
        self._point_gradients()
        yield
        self._current = before
        self._point_gradients()

    def adding_ahead(self) -> AbstractContextManager[None]:
        """A block whose backwards accumulate into the gradient of the update after the next.

        Raises:
            RuntimeError: there is one buffer only.
        """
        if len(self.gradients) == 1:
            raise RuntimeError(
                "the program gathers gradients of two updates at once, and there is one buffer"
            )
        return self.adding_to((self._current + 1) % len(self.gradients))

    def replica_of(self, version: int) -> Replica:
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
        """Hand the accumulated gradient to the update; later backwards accumulate into the next buffer.

        The `grad` of each master parameter becomes a view of the buffer that is handed over.
        """
        taken = self.gradient_buffer
        for parameter, view in zip(self.master.parameters, taken.owned_views, strict=True):
            parameter.grad = view
        if len(self.gradients) > 1:
            self._current = (self._current + 1) % len(self.gradients)
            self._point_gradients()
        return taken

    def _point_gradients(self) -> None:
        # Autograd adds into an existing .grad in place: all replicas share one buffer without a copy.
        for replica in self.replicas:
            for parameter, view in zip(replica.parameters, self.gradient_buffer.views, strict=True):
                if parameter.dtype != view.dtype:
                    parameter.grad_dtype = view.dtype
                parameter.grad = view

    def own_biases(self, replica: Replica) -> dict[str, Tensor]:
        """The balance biases of a replica, which data rank 0 saves for all, by name."""
        return replica.named_biases() if self._data_rank == 0 else {}

    def owned_members(self, replica: Replica) -> list[Tensor]:
        """The members of a replica's parameters that this data rank owns."""
        return [replica.members[number] for number in self.owned]

    @contextmanager
    def overwriting_oldest(self, *, version: int, biases: Tensor) -> Iterator[Sequence[Tensor]]:
        """A block that overwrites the yielded tensors: the oldest replica's members that this data rank owns.

        Afterwards the replica holds `version` with these balance biases. Where other data ranks own the rest,
        it holds no version until `receiving_others`.
        """
        replica = self.oldest()
        replica.biases = biases
        with self._writing(replica):
            yield self.owned_members(replica)
        whole = len(self.owned) == len(self.member_names)
        replica.version = version if whole else EMPTY

    @contextmanager
    def receiving_others(self, replica: Replica, *, version: int) -> Iterator[None]:
        """A block in which the members that other data ranks own are written; afterwards `replica` holds
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
            # A program may write under a pending backward only with a single replica; otherwise autograd must
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
