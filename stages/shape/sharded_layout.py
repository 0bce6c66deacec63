"""Who holds and who updates what under a schedule that shards the model. Imports no torch.

torch's `fully_shard` gives each process of a group the same number of rows of every parameter, of a stack of
experts whole matrices; the last processes may have fewer or none. What an optimizer updates value by value is
updated where it is held. A matrix that it needs whole has an owner, one of all processes: its gradient goes
there, and new rows come from there. Members of a stack stay where they are if every process holds as many.
With several groups (HSDP) each of them holds all of the model, and updates what needs no owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stages.shape.head import rows_name
from stages.shape.optimizer_sharding import assign_owners
from stages.shape.spec import Shape, is_stack, member_names


class Piece(NamedTuple):
    """Rows of a parameter that an optimizer sees as one tensor; of a stack, one matrix."""

    name: str
    parameter: int
    """Its number in the model."""
    rows: range


class Route(NamedTuple):
    """Rows of a matrix that one process sends another."""

    peer: int
    """The other process."""
    matrix: int
    """Number of the matrix in `Layout.matrices`."""
    rows: range


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Holders and owners of a model's parameters."""

    names: tuple[str, ...]
    """Names of the parameters, in the model's order."""
    shapes: tuple[Shape, ...]
    in_place: tuple[bool, ...]
    """Whether each parameter can be updated by rows."""
    processes: int
    shards: int
    """Processes that hold the whole model together; consecutive ones."""
    matrices: tuple[Piece, ...] = field(init=False)
    """What goes to owners, in the model's order."""
    owners: tuple[int, ...] = field(init=False)
    """The owner of each of `matrices`: the largest first, to the process with least so far."""

    def __post_init__(self) -> None:
        moving = [number for number in range(len(self.shapes)) if self.moves(number)]
        matrices = [
            piece for number in moving for piece in self._pieces(number, range(self.shapes[number][0]))
        ]
        shapes = [self.shapes[number] for number in moving]
        owned = assign_owners(shapes, data_ranks=self.processes).owned
        owner_of = {member: process for process, members in enumerate(owned) for member in members}
        object.__setattr__(self, "matrices", tuple(matrices))
        object.__setattr__(self, "owners", tuple(owner_of[member] for member in range(len(matrices))))

    def rows(self, parameter: int, process: int) -> range:
        """The rows of a parameter that a process holds."""
        count = self.shapes[parameter][0]
        chunk = -(-count // self.shards)
        return range(*(min((process % self.shards + more) * chunk, count) for more in (0, 1)))

    def held(self, process: int) -> list[Piece]:
        """What a process holds, in the model's order."""
        return [
            piece
            for parameter in range(len(self.names))
            for piece in self._pieces(parameter, self.rows(parameter, process))
        ]

    def owned(self, process: int) -> list[Piece]:
        """What a process updates, in the model's order."""
        resident = [piece for piece in self.held(process) if not self.moves(piece.parameter)]
        own = [matrix for matrix, owner in zip(self.matrices, self.owners, strict=True) if owner == process]
        return sorted([*resident, *own], key=lambda piece: (piece.parameter, piece.rows.start))

    def moves(self, parameter: int) -> bool:
        """Whether the matrices of a parameter go to owners."""
        shape = self.shapes[parameter]
        stays = self.processes == 1 or (is_stack(shape) and shape[0] % self.shards == 0)
        return not (self.in_place[parameter] or stays)

    def to_owners(self, process: int) -> tuple[list[Route], list[Route]]:
        """What a process sends of its gradients, and what it receives, within its group."""
        group = range(self._first(process), self._first(process) + self.shards)
        sent, received = [], []
        for number, (matrix, owner) in enumerate(zip(self.matrices, self.owners, strict=True)):
            if owner in group:
                sent += self._route(owner, number, matrix, holder=process)
            if owner == process:
                for holder in group:
                    received += self._route(holder, number, matrix, holder=holder)
        return sorted(sent), sorted(received)

    def from_owners(self, process: int) -> tuple[list[Route], list[Route]]:
        """What a process sends of the matrices that it has updated, and what it receives, from all groups."""
        sent, received = [], []
        for number, (matrix, owner) in enumerate(zip(self.matrices, self.owners, strict=True)):
            received += self._route(owner, number, matrix, holder=process)
            if owner == process:
                for holder in range(self.processes):
                    sent += self._route(holder, number, matrix, holder=holder)
        return sorted(sent), sorted(received)

    def _first(self, process: int) -> int:
        return process // self.shards * self.shards

    def _route(self, peer: int, number: int, matrix: Piece, *, holder: int) -> list[Route]:
        held = self.rows(matrix.parameter, holder)
        rows = range(max(held.start, matrix.rows.start), min(held.stop, matrix.rows.stop))
        return [Route(peer, number, rows)] if rows else []

    def _pieces(self, parameter: int, rows: range) -> list[Piece]:
        name, shape = self.names[parameter], self.shapes[parameter]
        if is_stack(shape):
            members = member_names(name, shape)
            return [Piece(members[row], parameter, range(row, row + 1)) for row in rows]
        if not rows:
            return []
        return [Piece(name if len(rows) == shape[0] else rows_name(name, rows), parameter, rows)]


def matrix_rounds(layout: Layout, *, number_bytes: int, most: int) -> list[range]:
    """The matrices in consecutive groups, each of which has at most about `most` bytes for a process."""
    rounds, first, size = [], 0, 0
    for number, matrix in enumerate(layout.matrices):
        shape = layout.shapes[matrix.parameter]
        size += number_bytes * values(shape, matrix.rows)
        if size >= most * layout.processes:
            rounds.append(range(first, number + 1))
            first, size = number + 1, 0
    if first < len(layout.matrices):
        rounds.append(range(first, len(layout.matrices)))
    return rounds


def values(shape: Shape, rows: Sequence[int]) -> int:
    """Number of values in some rows of a parameter."""
    count = len(rows)
    for size in shape[1:]:
        count *= size
    return count
