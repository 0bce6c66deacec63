"""The weights of a run whose model is under torch's `fully_shard`: this process has a shard of one version.

Shards have the type of the master copy: rows that are updated where they are held are the master copy. Of a
matrix with an owner (`stages.shape.sharded_layout`) the owner has the master copy, and shards hold it as
rounded. In each update gradients of such matrices move from the shards to the owners, and new weights back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from stages.comm.collectives import Exchange, Group, Reduction
from stages.comm.reduction_rounds import ROUND_BYTES
from stages.comm.sharding import Sharding
from stages.config.run_config import RunConfig
from stages.model.custom import make_stage
from stages.model.decoder import initialise
from stages.shape.partition import StageCut
from stages.shape.sharded_layout import Layout, Piece, Route, matrix_rounds
from stages.shape.spec import is_stack
from stages.weights.flat_buffers import GradientBuffer, Master, flat_views
from stages.weights.fully_sharded import shard_fully
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
        self._units = shard_fully(
            module, sharding, types=self._types, keeps_weights=self._keeps_weights, device=device
        )
        sharded = dict(module.named_parameters())
        self._parameters = [sharded[name] for name in self.names]
        self._local = [cast(DTensor, parameter).to_local().detach() for parameter in self._parameters]
        """For each parameter the rows that this process holds, `(rows, ...)`; none in some processes."""
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

    def _place_masters(self, replica: Replica) -> None:
        """Make the master copies and gradients of what this process updates."""
        layout, process, dtype = self._layout, self._sharding.process, self._types.master
        self._pieces = layout.owned(process)
        """What this process updates."""
        self.parameter_of = {piece.name: self.names[piece.parameter] for piece in self._pieces}
        self._matrices, self._matrix_gradients = self._new_matrices(), self._new_matrices()
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
            [piece.name for piece in self._pieces],
            [nn.Parameter(self._part(piece, self._local, self._matrices)) for piece in self._pieces],
        )
        gradients = [self._part(piece, held, self._matrix_gradients) for piece in self._pieces]
        first_group = process < self._sharding.size
        self._counted = [first_group or layout.moves(piece.parameter) for piece in self._pieces]
        """For each piece whether this process counts and saves it, of those that update the same rows."""
        self.gradients = [
            ShardedGradient(
                flat,
                held,
                owned=gradients,
                counted=list(compress(gradients, self._counted)),
                loads=torch.zeros_like(replica.biases, dtype=torch.int64),
            )
        ]

    def _new_matrices(self) -> dict[str, Tensor]:
        """Room for values of the matrices that this process owns, by name."""
        pieces = [piece for piece in self._pieces if self._layout.moves(piece.parameter)]
        shapes = [self._shape(piece) for piece in pieces]
        _, views = flat_views(shapes, dtype=self._types.master, device=self._device)
        return {piece.name: view for piece, view in zip(pieces, views, strict=True)}

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
        sent, received = self._to_owners
        moved = _Once(
            lambda: self._move(
                self._in_shards(sent, gradient.views),
                self._in_matrices(received, self._matrix_gradients),
                dtype=self._types.master,
            )
        )
        on_gpu = self._device.type == "cuda"

        def advance(whole: int) -> None:
            if on_gpu:
                moved()

        return Reduction(ready=moved.is_done, wait=moved, take=moved, advance=advance)

    def hand_out(self, data: Group, replica: Replica) -> Exchange[None]:
        """Send new matrices from their owners to all shards."""
        return self._spread(self._matrices)

    def _spread(self, matrices: Mapping[str, Tensor]) -> Exchange[None]:
        sent, received = self._from_owners
        moved = _Once(
            lambda: self._move(
                self._in_matrices(sent, matrices),
                self._in_shards(received, self._local),
                dtype=self._types.replica,
            )
        )
        if self._device.type == "cuda":
            moved()
        return Exchange(ready=moved.is_done, wait=moved, take=moved)

    def _in_shards(self, routes: Sequence[Route], held: Sequence[Tensor]) -> list[tuple[Route, Tensor]]:
        """Each route with its rows in the shards that this process holds."""
        matrices = self._layout.matrices
        return [
            (route, self._rows_of(matrices[route.matrix].parameter, route.rows, held)) for route in routes
        ]

    def _in_matrices(self, routes: Sequence[Route], own: Mapping[str, Tensor]) -> list[tuple[Route, Tensor]]:
        """Each route with its rows in the matrices that this process owns."""
        parts = []
        for route in routes:
            matrix = self._layout.matrices[route.matrix]
            shape = (len(matrix.rows), *self.shapes[self.names[matrix.parameter]][1:])
            first = matrix.rows.start
            rows = own[matrix.name].view(shape)[route.rows.start - first : route.rows.stop - first]
            parts.append((route, rows))
        return parts

    @torch.no_grad()
    def _move(
        self, sent: list[tuple[Route, Tensor]], received: list[tuple[Route, Tensor]], *, dtype: torch.dtype
    ) -> None:
        """Send rows of matrices to the peers of their routes and write what comes from theirs, as `dtype`."""
        sharding, nothing = self._sharding, torch.empty(0, dtype=dtype, device=self._device)
        for matrices in self._rounds:
            out, into = ([part for part in parts if part[0].matrix in matrices] for parts in (sent, received))
            given = torch.cat([nothing, *(rows.reshape(-1).to(dtype) for _, rows in out)])
            taken = nothing.new_empty(sum(rows.numel() for _, rows in into))
            if sharding.everyone is None:
                taken.copy_(given)
            else:
                sharding.exchange(given, taken, sizes=(self._by_peer(out), self._by_peer(into)))
            parts = torch.split(taken, [rows.numel() for _, rows in into])
            for (_, rows), part in zip(into, parts, strict=True):
                rows.copy_(part.view_as(rows))

    def _by_peer(self, parts: Sequence[tuple[Route, Tensor]]) -> list[int]:
        """Number of values that go to, or come from, each process."""
        return [
            sum(rows.numel() for route, rows in parts if route.peer == peer)
            for peer in range(self._sharding.processes)
        ]

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
        found = {name: tensor for name, tensor in tensors.items() if name not in self.parameter_of}
        for number, name in enumerate(self.names):
            if not self._stays_whole(number):
                gathered = self._gathered(number, tensors)
                if number % self._sharding.processes == self._sharding.process:
                    found[name] = gathered
        for piece in compress(self._pieces, self._counted):
            if self._stays_whole(piece.parameter):
                found[piece.name] = tensors[piece.name]
        return found

    def _stays_whole(self, parameter: int) -> bool:
        """Whether the tensors of a parameter that an optimizer sees are whole matrices."""
        return self._layout.moves(parameter) or is_stack(self.shapes[self.names[parameter]])

    def _gathered(self, parameter: int, tensors: Mapping[str, Tensor]) -> Tensor:
        """A parameter, from the rows that each process of this group updates."""
        sharding, shape = self._sharding, self.shapes[self.names[parameter]]
        width = self.sizes[parameter] // shape[0]
        padded = torch.zeros(
            -(-shape[0] // sharding.size) * width, dtype=self._types.master, device=self._device
        )
        for piece in self._pieces:
            if piece.parameter == parameter:
                padded[: len(piece.rows) * width] = tensors[piece.name].reshape(-1)
        gathered = padded.new_empty(len(padded) * sharding.size)
        sharding.gather(gathered, padded)
        return gathered[: self.sizes[parameter]].view(shape)


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
