"""A cell: a point of the matrix, its seeds averaged, and its numbers beside those of other cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from asyncpp_cli.report.loaded import STATES_BY_WEIGHT, Run
from asyncpp_cli.report.measure import Evaluation
from asyncpp_cli.report.statistics import Interval, Spread, paired, spread, welch
from schedules import FAMILY

FEW_SEEDS = 3
"""Below as many runs a mean says little."""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """When the runs of a cell first had a validation loss of at most a target: means over the seeds."""

    runs: int
    """That reached it."""
    of: int
    steps: Spread | None
    """None, like the others, unless all runs of the cell reached it."""
    tokens: Spread | None
    seconds: Spread | None
    """Of training; None for replayed runs, too."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of the matrix, its seeds averaged."""

    schedule: str
    optimizer: str
    error_feedback: float
    model: str
    axes: Mapping[str, Any]
    """Further keys in which cells differ, with this cell's value."""
    runs: tuple[Run, ...]
    synchronous: bool
    chosen: tuple[str, ...] = ()
    """Axes whose value was chosen by its result (`--best-over`): no part of what is compared."""
    target: float | None = None
    """Validation loss, nats a token, to say the way to of."""
    baseline: Cell | None = None
    """The synchronous cell that differs in schedule and correction alone; None for itself."""
    uncorrected: Cell | None = None
    """The cell that differs in having no correction; None for itself."""

    @property
    def correction(self) -> str | None:
        """The correction beside error feedback; None without one."""
        named = (run.value("correction.name") for run in self.runs)
        name = next((name for name in named if name is not None), None)
        return None if name in (None, "none") else str(name)

    @property
    def corrected(self) -> bool:
        return self.error_feedback != 0 or self.correction is not None

    def uses(self, key: str) -> bool:
        """Whether a setting means anything to the cell's schedule and corrections."""
        if key.startswith("correction.") and key != "correction.name":
            return self.correction is not None
        if key.startswith("error_feedback."):
            return self.error_feedback != 0
        schedule = FAMILY.get(self.schedule)
        if schedule is None:
            return True
        return {
            "schedule.delay": schedule.takes_delay,
            "schedule.ahead": schedule.takes_ahead,
            "schedule.chunks": schedule.takes_chunks,
            "schedule.update_interval": schedule.default_interval is not None,
        }.get(key, True)

    @property
    def state(self) -> str:
        return min((run.state for run in self.runs), key=STATES_BY_WEIGHT.index)

    @property
    def progress(self) -> float | None:
        """Share of the cell's steps that are done; None if nothing has begun."""
        known = [1.0 if run.state == "completed" else run.progress for run in self.runs]
        begun = [share for share in known if share is not None]
        return sum(begun) / len(self.runs) if begun else None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why runs failed, were interrupted or cannot be read, each beginning with the run's id."""
        return tuple(f"{run.id}: {run.state}: {run.reason}" for run in self.runs if run.reason is not None)

    @cached_property
    def completed(self) -> list[Run]:
        """The runs that the means are taken over."""
        return [run for run in self.runs if run.state == "completed"]

    @property
    def n(self) -> int:
        """How many those are."""
        return len(self.completed)

    def _spread(self, name: str) -> Spread | None:
        return spread(getattr(run.measurement, name) for run in self.completed)

    @cached_property
    def val_loss(self) -> Spread | None:
        return self._spread("val_loss")

    @cached_property
    def perplexity(self) -> Spread | None:
        """The mean over seeds of exp(validation loss)."""
        return spread(_exp(run.measurement.val_loss) for run in self.completed)

    @cached_property
    def bits_per_byte(self) -> Spread | None:
        return self._spread("bits_per_byte")

    @property
    def unigram_bits_per_byte(self) -> float | None:
        return next((one for one in self._known("unigram_bits_per_byte")), None)

    @cached_property
    def tokens_per_second(self) -> Spread | None:
        return self._spread("tokens_per_second")

    @cached_property
    def tokens_per_second_per_rank(self) -> Spread | None:
        return spread(run.tokens_per_second_per_rank for run in self.completed)

    @cached_property
    def utilisation(self) -> Spread | None:
        return spread(run.utilisation for run in self.completed)

    @cached_property
    def bubble(self) -> Spread | None:
        return self._spread("bubble")

    @property
    def bubble_predicted(self) -> float | None:
        return next((run.bubble_predicted for run in self.runs if run.bubble_predicted is not None), None)

    @property
    def delay(self) -> int | None:
        return max(self._known("delay"), default=None)

    @property
    def busy_by_rank(self) -> list[float]:
        """For each rank the share of the steady state in which it did not wait, mean over the seeds."""
        waited = _by_place(run.measurement.bubble_by_rank for run in self.completed)
        return [1 - sum(of_rank) / len(of_rank) for of_rank in waited]

    @property
    def peak_memory(self) -> list[float]:
        """Bytes of each rank of the pipeline, the largest over the seeds."""
        return [
            max(of_stage) for of_stage in _by_place(run.measurement.peak_memory for run in self.completed)
        ]

    @property
    def skipped_steps(self) -> int:
        """Over all runs."""
        return sum(run.measurement.skipped_steps for run in self.runs)

    @property
    def restarts(self) -> int:
        """Over all runs."""
        return sum(run.restarts for run in self.runs)

    def _known(self, name: str) -> list[Any]:
        values = [getattr(run.measurement, name) for run in self.completed]
        return [value for value in values if value is not None]

    @property
    def gap(self) -> float | None:
        """Validation loss of this cell minus that of its synchronous counterpart, in nats a token."""
        if self.baseline is None or self.val_loss is None or self.baseline.val_loss is None:
            return None
        return self.val_loss.mean - self.baseline.val_loss.mean

    @cached_property
    def gap_interval(self) -> Interval | None:
        """Welch's interval of the gap; None where one of the two has a single run."""
        if self.baseline is None or self.val_loss is None or self.baseline.val_loss is None:
            return None
        return welch(self.val_loss, self.baseline.val_loss)

    @cached_property
    def gap_interval_paired(self) -> Interval | None:
        """The interval from the differences of runs with the same seed; None if the seeds differ."""
        if self.baseline is None:
            return None
        mine, theirs = _loss_by_seed(self), _loss_by_seed(self.baseline)
        if not mine or mine.keys() != theirs.keys():
            return None
        return paired([loss - theirs[seed] for seed, loss in mine.items()])

    @property
    def recovered(self) -> float | None:
        """Share of the gap without a correction that this one closes; None without such a gap."""
        plain = self.uncorrected.gap if self.uncorrected is not None else None
        if plain is None or self.gap is None or not plain > 0:
            return None
        interval = self.uncorrected.gap_interval if self.uncorrected is not None else None
        if interval is not None and interval.holds_zero:
            # A share of what may be nothing.
            return None
        return (plain - self.gap) / plain

    @property
    def throughput_ratio(self) -> float | None:
        """Tokens a second of this cell over those of its synchronous counterpart."""
        mine, base = self.tokens_per_second, self.baseline.tokens_per_second if self.baseline else None
        return mine.mean / base.mean if mine is not None and base is not None and base.mean > 0 else None

    @cached_property
    def reached(self) -> Reached | None:
        """When the target was reached; None without a target or a completed run."""
        done = self.completed
        if self.target is None or not done:
            return None
        first = [run.measurement.first_at(self.target) for run in done]
        known = [evaluation for evaluation in first if evaluation is not None]
        whole = known if len(known) == len(done) else []
        timed = [] if any(run.measurement.replayed for run in done) else whole
        return Reached(
            runs=len(known),
            of=len(done),
            steps=_spread_of(whole, "step"),
            tokens=_spread_of(whole, "tokens"),
            seconds=_spread_of(timed, "seconds"),
        )

    @property
    def time_to_target_ratio(self) -> float | None:
        """Training time of the synchronous counterpart to the target over that of this cell."""
        mine, theirs = self.reached, self.baseline.reached if self.baseline is not None else None
        if mine is None or theirs is None or mine.seconds is None or theirs.seconds is None:
            return None
        return theirs.seconds.mean / mine.seconds.mean if mine.seconds.mean > 0 else None


def _spread_of(evaluations: Iterable[Evaluation], name: str) -> Spread | None:
    return spread(float(getattr(one, name)) for one in evaluations)


def _loss_by_seed(cell: Cell) -> dict[Any, float]:
    losses: dict[Any, float] = {}
    for run in cell.completed:
        seed, loss = run.value("seed"), run.measurement.val_loss
        if seed is None or loss is None or seed in losses:
            return {}
        losses[seed] = loss
    return losses


def _by_place(of_runs: Iterable[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """What all runs say of the first place, of the second, ...; empty ones say nothing."""
    known = [of_run for of_run in of_runs if of_run]
    return list(zip(*known, strict=False))


def _exp(value: float | None) -> float | None:
    try:
        return None if value is None else math.exp(value)
    except OverflowError:
        return math.inf
