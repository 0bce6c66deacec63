"""In which pieces the data ranks of a stage exchange their gradients. Imports no torch.

Every owner has to receive its part of the gradient from all data ranks. At once that would take room for as
many parts as there are data ranks: 10 GB a stage for the 10B model on 4 stages. So it goes in rounds, of
which each has a piece of every owner's part. Pieces are taken from the end of the model, whose gradients are
whole first: where nothing else hides the exchange, it begins while the last backward still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from stages.ownership import Ownership

ROUND_BYTES = 2**27
"""That a rank sends in one round, and that it receives, at most."""
UNDER_WAY = 2
"""Rounds at a time: while one is added up the next one travels."""
EARLY_ROUNDS = 16
"""Rounds, about, of an exchange that begins within a backward: the last of them is left after it."""
WORTH_BEGINNING = 0.75
"""Share of a full round that an early one must have: what is less waits for gradients of further owners."""
LEAST_PIECE = 2**16
"""Entries of a piece that the number of early rounds alone does not make smaller: it would take as long."""


@dataclass(frozen=True)
class Round:
    """What is exchanged at once."""

    pieces: tuple[tuple[int, int], ...]
    """For each owner the entries `start .. end - 1` of the flat buffer, of its own part."""
    needs: int
    """Parameters, counted from the end of the model, whose gradients must be whole."""


@dataclass(frozen=True, kw_only=True)
class ReductionPlan:
    """The rounds of a stage's reduction."""

    ownership: Ownership
    sizes: tuple[int, ...]
    """Entries of each parameter."""
    number_bytes: int
    """Of one entry."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """Data rank d owns the entries `bounds[d] .. bounds[d + 1] - 1`."""
        return self.ownership.bounds

    @cached_property
    def parts(self) -> list[int]:
        """Entries that each data rank owns."""
        return [end - start for start, end in pairwise(self.bounds)]

    @cached_property
    def largest_piece(self) -> int:
        """Entries of an owner's part in one round, at most."""
        return max(1, min(max(self.parts), ROUND_BYTES // (len(self.parts) * self.number_bytes)))

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """Where all of the gradient is there before it is exchanged."""
        return self._rounds(self.largest_piece, early=False)

    @cached_property
    def early_rounds(self) -> tuple[Round, ...]:
        """Where it is exchanged while the last backward runs."""
        piece = max(-(-max(self.parts) // EARLY_ROUNDS), LEAST_PIECE)
        return self._rounds(min(piece, self.largest_piece), early=True)

    def sent_entries(self) -> int:
        """Room for what is sent in one round."""
        return sum(min(part, self.largest_piece) for part in self.parts)

    def received_entries(self, data_rank: int) -> int:
        """Room for what `data_rank` receives in one round."""
        return len(self.parts) * min(self.parts[data_rank], self.largest_piece)

    def _rounds(self, piece: int, *, early: bool) -> tuple[Round, ...]:
        owner_of = {
            parameter: owner for owner, owned in enumerate(self.ownership.owned) for parameter in owned
        }
        owners = sum(part > 0 for part in self.parts)
        whole = list(self.bounds[1:])  # from here on an owner's part is whole
        begun = list(self.bounds[1:])  # and from here on exchanged
        rounds = []
        for needs, parameter in enumerate(reversed(range(len(self.sizes))), start=1):
            whole[owner_of[parameter]] -= self.sizes[parameter]
            last = needs == len(self.sizes)
            if not (early or last):
                continue
            while any(waiting := [min(piece, b - w) for b, w in zip(begun, whole, strict=True)]):
                # A round takes as long as its largest piece, so one that lacks many is put off.
                if not last and sum(waiting) < WORTH_BEGINNING * piece * owners:
                    break
                ends = begun
                begun = [end - size for end, size in zip(ends, waiting, strict=True)]
                rounds.append(Round(tuple(zip(begun, ends, strict=True)), needs))
        return tuple(rounds)


def reduction_plan(sizes: Sequence[int], ownership: Ownership, *, number_bytes: int) -> ReductionPlan:
    """The plan of a stage.

    Args:
        sizes: entries of each of its parameters, in the model's order.
        ownership: of them.
        number_bytes: of one entry of a gradient.
    """
    return ReductionPlan(ownership=ownership, sizes=tuple(sizes), number_bytes=number_bytes)


def room_bytes(plans: Sequence[ReductionPlan], *, data_rank: int | None = None) -> int:
    """Bytes of all buffers for stages with these plans, one after another: those of `data_rank`, or of the
    one that needs most (None). A data rank alone has nothing to exchange."""
    if len(plans[0].ownership.owned) == 1:
        return 0
    received = []
    for plan in plans:
        parts = plan.parts
        received.append(plan.received_entries(parts.index(max(parts)) if data_rank is None else data_rank))
    sent = max(plan.sent_entries() for plan in plans)
    return UNDER_WAY * (sent + max(received)) * plans[0].number_bytes
