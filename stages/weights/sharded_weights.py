"""The weights of a run whose model is under torch's `fully_shard`: this process has a shard of one version.

A block is a unit, which torch gathers before its forward and backward; embedding, last norm and head are the
unit of the module itself. Shards have the type of the master copy: rows that are updated in place are the
master copy, and torch rounds them as it gathers them. Of a matrix with an owner
(`stages.shape.sharded_layout`) the owner has the master copy, and shards hold it as rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from stages.comm.collectives import Exchange, Group, Reduction
from stages.comm.reduction_rounds import ROUND_BYTES
from stages.comm.sharding import Gather, Scatter, Sharding
from stages.config.run_config import RunConfig
from stages.model.custom import make_stage
from stages.model.decoder import RunBlock, Stage, initialise
from stages.model.runner import RUN_BY
from stages.shape.partition import StageCut
from stages.shape.sharded_layout import Layout, Piece, Route, matrix_rounds
from stages.shape.spec import is_stack
from stages.weights.flat_buffers import GradientBuffer, Master, flat_views
from stages.weights.number_formats import dtypes
from stages.weights.weight_versions import Replica, WeightVersions


class ShardedGradient(GradientBuffer):
    """The gradient of a shard, into which torch adds what it has reduced, and of this process's matrices.

    Args:
        flat: of the shard.
        held: for each parameter, its part of `flat`.
        owned: for each piece that this process updates, its gradient.
        counted: those of them that no other process has.
        loads: as for `GradientBuffer`.
    """

    def __init__(
        self, flat: Tensor, held: list[Tensor], *, owned: list[Tensor], counted: list[Tensor], loads: Tensor
    ) -> None:
        super().__init__(flat, held, part=None, runs=(), owned=(), loads=loads)
        self.owned_runs = self.owned_views = owned
        self.counted_views = counted


class ShardedWeights(WeightVersions):
    """The weights of the whole model, as far as this process holds and owns them.

    Args:
        config: of the run. Under `schedule.keep_weights` a block's weights stay from its forward to its
            backward; under `schedule.reduce_each` gradients are reduced after every micro-batch, otherwise
            whole ones wait for the last, as do weights that stay.
        cut: the whole model.
        in_place: whether the optimizer updates a parameter value by value, from its name and dimensions.
        sharding: the processes.
        device: holds shards, owned matrices and gradients.
    """

    reduces_early = False
    is_sharded = True

    def __init__(
        self,
        config: RunConfig,
        cut: StageCut,
        *,
        in_place: Callable[[str, int], bool],
        sharding: Sharding,
        device: torch.device,
    ) -> None:
        self._sharding, self._device = sharding, device
        self._keeps_weights = config.schedule.keep_weights
        self._reduces_each = config.schedule.reduce_each
        self._types = dtypes(config)
        with torch.device("meta"):
            module = make_stage(config.model, cut, context=config.data.context).to(self._types.master)
        named = dict(module.named_parameters())
        self.shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        self.names = list(self.shapes)
        self.sizes = [parameter.numel() for parameter in named.values()]
        self._layout = Layout(
            names=tuple(self.names),
            shapes=tuple(self.shapes.values()),
            in_place=tuple(in_place(name, len(shape)) for name, shape in self.shapes.items()),
            processes=sharding.processes,
            shards=sharding.size,
        )
        self._under_torch(module)
        self._parameters = [dict(module.named_parameters())[name] for name in self.names]
        self._local = [cast(DTensor, parameter).to_local().detach() for parameter in self._parameters]
        replica = Replica(
            module, torch.empty(0, device=device), [nn.Parameter(part) for part in self._local], version=0
        )
        self.replicas = [replica]
        self._current = 0
        self._place_masters(replica)
        self._data_rank = sharding.process
        self._waits = False
        """Whether whole gradients wait for a later micro-batch."""
        self._kept: list[Tensor] = []
        """The shards, while others are evaluated."""
        self._to_owners = self._layout.to_owners(sharding.process)
        self._from_owners = self._layout.from_owners(sharding.process)
        self._rounds = matrix_rounds(self._layout, number_bytes=self._types.master.itemsize, most=ROUND_BYTES)

        def draw(name: str, weight: Tensor) -> None:
            initialise(weight, name=name, seed=config.seed, model=config.model)

        self._fill_with(draw)

    def _under_torch(self, module: Stage) -> Stage:
        """Put the module, which has no values yet, under `fully_shard`, and give it room for its shards."""
        policy = MixedPrecisionPolicy()
        narrow = self._types.replica != self._types.master
        if narrow:
            # Types of activations are as in other runs: nothing is cast but weights.
            policy = MixedPrecisionPolicy(
                param_dtype=self._types.replica, reduce_dtype=self._types.master, cast_forward_inputs=False
            )
        blocks = list(module.blocks.values())
        reshards = not self._keeps_weights
        for block in blocks:
            fully_shard(block, mesh=self._sharding.mesh, reshard_after_forward=reshards, mp_policy=policy)
            setattr(block, RUN_BY, MethodType(_run_by, block))
            register_fsdp_forward_method(block, RUN_BY)
        fully_shard(module, mesh=self._sharding.mesh, mp_policy=policy)
        module.to_empty(device=self._device)
        module.prepare(device=self._device, dtype=self._types.replica)
        self._units = cast("list[FSDPModule]", [module, *blocks])
        for unit in self._units:
            # The executor divides the loss; sums are of all processes.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_custom_all_gather(cast(Any, Gather(self._sharding)))
            unit.set_custom_reduce_scatter(cast(Any, Scatter(self._sharding)))
            if self._sharding.replicas is not None:
                unit.set_all_reduce_hook(self._sharding.add_replicas)
        if narrow:
            for block in blocks:
                _widen_gradients(block, partial(_own_parameters, block), self._types.master)
            _widen_gradients(module, partial(_own_parameters, module, blocks), self._types.master)
        return module

    def _place_masters(self, replica: Replica) -> None:
        """Make the master copies and gradients of what this process updates."""
        layout, process, dtype = self._layout, self._sharding.process, self._types.master
        owned = layout.owned(process)
        self.parameter_of = {piece.name: self.names[piece.parameter] for piece in owned}
        self._pieces = owned
        matrices = [piece for piece in owned if layout.moves(piece.parameter)]
        shapes = [self._shape(piece) for piece in matrices]
        _, masters = flat_views(shapes, dtype=dtype, device=self._device)
        _, of_matrices = flat_views(shapes, dtype=dtype, device=self._device)
        self._matrices = {piece.name: master for piece, master in zip(matrices, masters, strict=True)}
        self._matrix_gradients = {piece.name: one for piece, one in zip(matrices, of_matrices, strict=True)}
        flat, held = flat_views([tuple(part.shape) for part in self._local], dtype=dtype, device=self._device)
        for parameter, gradient in zip(self._parameters, held, strict=True):
            parameter.grad = DTensor.from_local(
                gradient,
                self._sharding.mesh,
                [Shard(0)],
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        self.master = Master(
            [piece.name for piece in owned],
            [nn.Parameter(self._part(piece, self._local, self._matrices)) for piece in owned],
        )
        gradients = [self._part(piece, held, self._matrix_gradients) for piece in owned]
        first_group = process < self._sharding.size
        self._counted = [first_group or layout.moves(piece.parameter) for piece in owned]
        self.gradients = [
            ShardedGradient(
                flat,
                held,
                owned=gradients,
                counted=[one for one, counts in zip(gradients, self._counted, strict=True) if counts],
                loads=torch.zeros_like(replica.biases, dtype=torch.int64),
            )
        ]

    def _shape(self, piece: Piece) -> tuple[int, ...]:
        shape = self.shapes[self.names[piece.parameter]]
        return shape[1:] if is_stack(shape) else (len(piece.rows), *shape[1:])

    def _part(self, piece: Piece, held: Sequence[Tensor], own: Mapping[str, Tensor]) -> Tensor:
        """The tensor of a piece that this process updates: a part of the shards, or a matrix of its own."""
        if piece.name in own:
            return own[piece.name]
        return self._rows_of(piece.parameter, piece.rows, held).view(self._shape(piece))

    def _rows_of(self, parameter: int, rows: range, held: Sequence[Tensor]) -> Tensor:
        """Some of the rows of a parameter that this process holds."""
        first = self._layout.rows(parameter, self._sharding.process).start
        return held[parameter][rows.start - first : rows.stop - first]

    @torch.no_grad()
    def _fill_with(self, write: Callable[[str, Tensor], object]) -> None:
        """Fill the master copy; `write` fills a whole matrix, of which a generator gives no single rows."""
        for piece, weight in zip(self._pieces, self.master.parameters, strict=True):
            shape = self.shapes[self.names[piece.parameter]]
            if is_stack(shape) or len(piece.rows) == shape[0]:
                write(piece.name, weight)
            else:
                whole = torch.empty(shape, dtype=torch.float32)
                write(self.names[piece.parameter], whole)
                weight.copy_(whole[piece.rows.start : piece.rows.stop])

    def load_initial(self, weights: Mapping[str, Tensor]) -> None:
        self._fill_with(lambda name, weight: weight.copy_(weights[name]))
        self._load_biases(weights)

    def owned_members(self, replica: Replica) -> list[Tensor]:
        return [parameter.detach().to(self._types.replica) for parameter in self.master.parameters]

    def version_targets(self, replica: Replica, version: int) -> dict[str, Tensor]:
        # Read as the master copy, so that nothing is rounded twice.
        targets = {
            f"master/{piece.name}": self._rows_of(piece.parameter, piece.rows, self._local).view(
                self._shape(piece)
            )
            for piece in self._layout.held(self._sharding.process)
        }
        return targets | {f"version/{version}/{name}": bias for name, bias in replica.named_biases().items()}

    def saves(self, name: str) -> bool:
        return self._counted[self.master.names.index(name)]

    @contextmanager
    def overwriting_oldest(self, *, version: int, biases: Tensor) -> Iterator[Sequence[Tensor]]:
        replica = self.oldest()
        replica.biases = biases
        with torch.no_grad():
            yield self.master.parameters
        replica.version = version

    @contextmanager
    def receiving_others(self, replica: Replica, *, version: int) -> Iterator[None]:
        with torch.no_grad():
            yield
        replica.version = version

    @property
    def room_bytes(self) -> int:
        """Bytes that torch takes beside shards: the weights of the module itself and of two blocks, or of
        all that are kept, and the whole gradients of the module itself and of two blocks, one of them on its
        way, or of all that wait for the last micro-batch, and of one on its way."""
        blocks = [
            sum(size for name, size in zip(self.names, self.sizes, strict=True) if name.startswith(block))
            for block in (f"blocks.{index}." for index in self.replicas[0].module.blocks)
        ]
        own = sum(self.sizes) - sum(blocks)
        weights = own + (sum(blocks) if self._keeps_weights else 2 * max(blocks))
        gradients = own + max(blocks) + (sum(blocks) if self._waits else max(blocks))
        return weights * self._types.replica.itemsize + gradients * self._types.master.itemsize

    def before_backward(self, *, last: bool) -> None:
        reduces = last or self._reduces_each
        self._waits |= not reduces
        self._units[0].set_requires_gradient_sync(reduces)
        self._units[0].set_reshard_after_backward(reduces or not self._keeps_weights)

    def reduce(self, data: Group, gradient: GradientBuffer, *, early: bool) -> Reduction:
        """Hand the gradients of matrices, which torch has reduced, to the owners."""
        moved = _Once(lambda: self._move(self._to_owners, gradient.views, self._matrix_gradients, back=False))
        now = self._device.type == "cuda"

        def advance(whole: int) -> None:
            if now:
                moved()

        return Reduction(ready=moved.is_done, wait=moved, take=moved, advance=advance)

    def hand_out(self, data: Group, replica: Replica) -> Exchange[None]:
        """Send new matrices from their owners to all shards."""
        return self._spread(self._matrices)

    def _spread(self, matrices: Mapping[str, Tensor]) -> Exchange[None]:
        moved = _Once(lambda: self._move(self._from_owners, self._local, matrices, back=True))
        if self._device.type == "cuda":
            moved()
        return Exchange(ready=moved.is_done, wait=moved, take=moved)

    @torch.no_grad()
    def _move(
        self,
        routes: tuple[list[Route], list[Route]],
        held: Sequence[Tensor],
        own: Mapping[str, Tensor],
        *,
        back: bool,
    ) -> None:
        """Move rows of matrices between the shards `held` and the owners' `own`, `back` to the shards."""
        sharding, layout = self._sharding, self._layout
        dtype = self._types.replica if back else self._types.master

        def part(route: Route, of_owner: bool) -> Tensor:
            matrix = layout.matrices[route.matrix]
            if not of_owner:
                return self._rows_of(matrix.parameter, route.rows, held)
            whole = own[matrix.name]
            whole = whole.view(len(matrix.rows), *self.shapes[self.names[matrix.parameter]][1:])
            first = matrix.rows.start
            return whole[route.rows.start - first : route.rows.stop - first]

        for matrices in self._rounds:
            sent, received = ([one for one in ways if one.matrix in matrices] for ways in routes)
            given = [part(route, back) for route in sent]
            into = [part(route, not back) for route in received]
            sizes = tuple(
                [
                    sum(one.numel() for one, route in zip(parts, ways, strict=True) if route.peer == peer)
                    for peer in range(sharding.processes)
                ]
                for parts, ways in ((given, sent), (into, received))
            )
            nothing = torch.empty(0, dtype=dtype, device=self._device)
            out = torch.cat([nothing, *(one.reshape(-1).to(dtype) for one in given)])
            taken = torch.empty(sum(sizes[1]), dtype=dtype, device=self._device)
            if sharding.everyone is None:
                taken.copy_(out)
            else:
                sharding.exchange(out, taken, sizes=cast("tuple[list[int], list[int]]", sizes))
            for target, one in zip(into, torch.split(taken, [each.numel() for each in into]), strict=True):
                target.copy_(one.view_as(target))

    @torch.no_grad()
    def show(self, weights: Sequence[Tensor]) -> None:
        """Put other weights, of the pieces that this process updates, into the shards until `hide`."""
        self._kept = [part.clone() for part in self._local]
        matrices = dict(zip(self.master.names, weights, strict=True))
        for piece, weight in zip(self._pieces, weights, strict=True):
            if not self._layout.moves(piece.parameter):
                self._part(piece, self._local, {}).copy_(weight)
        self._spread(matrices).complete()

    @torch.no_grad()
    def hide(self) -> None:
        for part, kept in zip(self._local, self._kept, strict=bool(self._kept)):
            part.copy_(kept)
        self._kept = []
        for unit in self._units:
            unit.reshard()

    @torch.no_grad()
    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """From tensors of the pieces that processes update, whole ones by name; each on one process."""
        sharding, layout = self._sharding, self._layout
        found = {name: tensor for name, tensor in tensors.items() if name not in self.parameter_of}
        for number, name in enumerate(self.names):
            shape = self.shapes[name]
            if layout.moves(number) or is_stack(shape):
                continue
            rows = layout.rows(number, sharding.process)
            part = next(
                (tensors[piece.name] for piece in self._pieces if piece.parameter == number and rows),
                None,
            )
            chunk, width = -(-shape[0] // sharding.size), self.sizes[number] // shape[0]
            padded = torch.zeros(chunk * width, dtype=self._types.master, device=self._device)
            if part is not None:
                padded[: part.numel()] = part.reshape(-1)
            gathered = padded.new_empty(chunk * width * sharding.size)
            sharding.gather(gathered, padded)
            if number % sharding.processes == sharding.process:
                found[name] = gathered[: self.sizes[number]].view(shape)
        for piece, counts in zip(self._pieces, self._counted, strict=True):
            if counts and (
                layout.moves(piece.parameter) or is_stack(self.shapes[self.names[piece.parameter]])
            ):
                found[piece.name] = tensors[piece.name]
        return found


class _Once:
    """Work that is done when it is first asked for."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def is_done(self) -> bool:
        return self._work is None

    def __call__(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            work()


def _own_parameters(module: nn.Module, without: Sequence[nn.Module] = ()) -> list[nn.Parameter]:
    inner = {id(parameter) for other in without for parameter in other.parameters()}
    return [parameter for parameter in module.parameters() if id(parameter) not in inner]


def _widen_gradients(
    unit: nn.Module, parameters: Callable[[], list[nn.Parameter]], dtype: torch.dtype
) -> None:
    """Let the backward of a unit add gradients in a wider type, as it does where replicas are whole
    (`stages.model.gradients.weight_gradient`).

    Args:
        unit: of `fully_shard`; this hook follows torch's, so its weights are whole.
        parameters: gives its own.
        dtype: of the gradients.
    """

    whole: list[nn.Parameter] = []

    def make_room(gradient: Tensor) -> None:
        for parameter in whole:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)

    def before(unit: nn.Module, given: Any) -> None:
        whole[:] = parameters()
        for parameter in whole:
            parameter.grad_dtype = dtype

    def after(unit: nn.Module, given: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if tensor.requires_grad:
                tensor.register_hook(make_room)
                return

    unit.register_forward_pre_hook(before)
    unit.register_forward_hook(after)


def _run_by(block: nn.Module, run: RunBlock, *given: Any) -> Any:
    """Run a block by a function that does not call it, with the hooks that a call would have."""
    for hook in block._forward_pre_hooks.values():
        if hook.__module__ == __name__:
            hook(block, given)
    output = run(block, *given)
    for hook in block._forward_hooks.values():
        if hook.__module__ == __name__:
            hook(block, given, output)
    return output
