"""A cell: a point of the matrix, its seeds averaged, and its numbers beside those of other cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from asyncpp_cli.report.loaded import STATES_BY_WEIGHT, Run
from asyncpp_cli.report.measure import Evaluation
from asyncpp_cli.report.pairs import Pairs, losses_by_seed, pairs
from asyncpp_cli.report.statistics import Interval, Spread, spread
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

    @cached_property
    def losses(self) -> dict[Any, float]:
        """Validation loss by seed."""
        return losses_by_seed(self.completed)

    @cached_property
    def gap_pairs(self) -> Pairs | None:
        """This cell's losses beside those of its synchronous counterpart; None where there is nothing."""
        if self.baseline is None or not self.losses or not self.baseline.losses:
            return None
        return pairs(self.losses, self.baseline.losses)

    @property
    def gap(self) -> float | None:
        """Validation loss of this cell minus that of its synchronous counterpart, in nats a token.

        The mean over the seeds that both have; None where they have none in common.
        """
        return self.gap_pairs.mean if self.gap_pairs is not None else None

    @cached_property
    def gap_interval(self) -> Interval | None:
        """From the differences of runs with the same seed; None for fewer than two pairs."""
        return self.gap_pairs.interval if self.gap_pairs is not None else None

    @property
    def recovered(self) -> float | None:
        """Share of the gap without a correction that this one closes, over the seeds that the three cells
        have; None without such a gap."""
        if self.uncorrected is None or self.baseline is None:
            return None
        seeds = self.losses.keys() & self.uncorrected.losses.keys() & self.baseline.losses.keys()
        of_seeds = {seed: self.baseline.losses[seed] for seed in seeds}
        plain = pairs({seed: self.uncorrected.losses[seed] for seed in seeds}, of_seeds)
        mine = pairs({seed: self.losses[seed] for seed in seeds}, of_seeds)
        if plain.mean is None or mine.mean is None or not plain.mean > 0:
            return None
        if plain.interval is not None and plain.interval.holds_zero:
            # A share of what may be nothing.
            return None
        return (plain.mean - mine.mean) / plain.mean

    @property
    def updates_per_step(self) -> float | None:
        """Updates of a stage for each step's tokens: 1 but where stages update on their own, more often."""
        schedule, microbatches = FAMILY.get(self.schedule), self.runs[0].value("schedule.microbatches")
        if schedule is None or not isinstance(microbatches, int):
            return None
        if schedule.default_interval is None:
            return 1.0
        asked = self.runs[0].value("schedule.update_interval")
        interval = asked if isinstance(asked, int) else schedule.default_interval(microbatches)
        return microbatches / interval

    @property
    def update_ratio(self) -> float | None:
        """Updates on the same tokens, over those of the synchronous counterpart."""
        mine, theirs = self.updates_per_step, self.baseline.updates_per_step if self.baseline else None
        return mine / theirs if mine is not None and theirs else None

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


def _by_place(of_runs: Iterable[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """What all runs say of the first place, of the second, ...; empty ones say nothing."""
    known = [of_run for of_run in of_runs if of_run]
    return list(zip(*known, strict=False))


def _exp(value: float | None) -> float | None:
    try:
        return None if value is None else math.exp(value)
    except OverflowError:
        return math.inf
