"""The rounds in which the data ranks of a stage exchange their gradients. Imports no torch.

Every owner receives its part of the gradient from all data ranks. In one exchange, that would take buffers
for as many parts as there are data ranks: 10 GB per stage for the 10B model on 4 stages. So there are rounds,
each with a piece of every owner's part. Pieces are taken from the end of the model, whose gradients are
complete first: if nothing else hides the exchange, it begins while the last backward still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from stages.shape.optimizer_sharding import Ownership, Run, runs_between

ROUND_BYTES = 2**27
"""The most bytes that a rank sends in one round, and the most that it receives."""
UNDER_WAY = 2
"""Rounds at a time: one is summed while the next is sent."""
EARLY_ROUNDS = 16
"""Approximate number of rounds of an exchange that begins within a backward; the last one follows it."""
WORTH_BEGINNING = 0.75
"""Share of a full round that an early one must have; less waits for gradients of further owners."""
LEAST_PIECE = 2**16
"""Entries below which a piece of an early round is not made smaller, because it would take as long."""


@dataclass(frozen=True)
class Round:
    """One exchange."""

    pieces: tuple[tuple[Run, ...], ...]
    """For each owner, the runs of its entries in the flat buffer."""
    needs: int
    """Number of parameters, from the end of the model, whose gradients must be complete."""


@dataclass(frozen=True, kw_only=True)
class ReductionPlan:
    """The rounds of a stage's reduction."""

    ownership: Ownership
    sizes: tuple[int, ...]
    """Entries of each parameter."""
    number_bytes: int
    """Bytes of one entry."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Number of entries that each data rank owns."""
        return self.ownership.parts

    @property
    def largest_piece(self) -> int:
        """The most entries of an owner's part in one round."""
        return max(1, min(max(self.parts), ROUND_BYTES // (len(self.parts) * self.number_bytes)))

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds of a gradient that is complete before it is exchanged."""
        return self._rounds(self.largest_piece, early=False)

    @cached_property
    def early_rounds(self) -> tuple[Round, ...]:
        """The rounds of a gradient that is exchanged while the last backward runs."""
        piece = max(-(-max(self.parts) // EARLY_ROUNDS), LEAST_PIECE)
        return self._rounds(min(piece, self.largest_piece), early=True)

    def sent_entries(self) -> int:
        """Entries of the send buffer of one round."""
        return sum(min(part, self.largest_piece) for part in self.parts)

    def received_entries(self, data_rank: int) -> int:
        """Entries of the receive buffer of one round on `data_rank`."""
        return len(self.parts) * min(self.parts[data_rank], self.largest_piece)

    def _rounds(self, piece: int, *, early: bool) -> tuple[Round, ...]:
        owners = sum(part > 0 for part in self.parts)
        whole = list(self.parts)  # where the complete end of each owner's entries begins
        begun = list(self.parts)  # where their exchanged end begins
        rounds = []
        for needs, shares in enumerate(reversed(self.ownership.shares), start=1):
            whole = [entry - share for entry, share in zip(whole, shares, strict=True)]
            last = needs == len(self.sizes)
            if not (early or last):
                continue
            while any(waiting := [min(piece, b - w) for b, w in zip(begun, whole, strict=True)]):
                # A round takes as long as its largest piece, so one with few pieces is deferred.
                if not last and sum(waiting) < WORTH_BEGINNING * piece * owners:
                    break
                ends = begun
                begun = [end - size for end, size in zip(ends, waiting, strict=True)]
                pieces = map(runs_between, self.ownership.runs, begun, ends)
                rounds.append(Round(tuple(pieces), needs))
        return tuple(rounds)


def reduction_plan(sizes: Sequence[int], ownership: Ownership, *, number_bytes: int) -> ReductionPlan:
    """The plan of a stage.

    Args:
        sizes: entries of each of its parameters, in the model's order.
        ownership: of these parameters.
        number_bytes: bytes of one entry of a gradient.
    """
    return ReductionPlan(ownership=ownership, sizes=tuple(sizes), number_bytes=number_bytes)


def room_bytes(plans: Sequence[ReductionPlan]) -> int:
    """Bytes of the buffers that stages with these plans share, on the data rank that needs most. Zero for a
    single data rank."""
    if len(plans[0].ownership.owned) == 1:
        return 0
    received = max(plan.received_entries(plan.parts.index(max(plan.parts))) for plan in plans)
    sent = max(plan.sent_entries() for plan in plans)
    return UNDER_WAY * (sent + received) * plans[0].number_bytes
