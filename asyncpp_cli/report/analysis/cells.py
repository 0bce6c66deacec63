"""A cell of the matrix with its seeds averaged, its numbers relative to other cells, and its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import Any, TypeVar

from asyncpp_cli.report.analysis.statistics import (
    NO_PAIRS,
    Interval,
    Pairs,
    Spread,
    paired,
    pairs,
    spread,
    welch,
)
from asyncpp_cli.report.load.measure import Slowest
from asyncpp_cli.report.load.run import STATES_BY_WEIGHT, RunResult, Settings, only, settings_of
from asyncpp_cli.runs.attempts.cost import Cost, total
from schedules import KNOWN, OPTIONS

_Value = TypeVar("_Value")

Number = Callable[[RunResult], float | None]

VAL_LOSS: Number = attrgetter("val_loss")


def positive_speed(run: RunResult) -> float | None:
    """Tokens per second, above zero."""
    return run.tokens_per_second or None


FEW_SEEDS = 3
"""With fewer runs a mean says little."""


@dataclass(frozen=True, kw_only=True)
class TargetReached:
    """When the runs of a cell first reached a target loss, over the seeds."""

    runs: int
    """Number of runs that reached it."""
    of: int
    """Number of completed runs."""
    steps: Spread | None
    """None, like tokens and seconds, unless all completed runs reached it."""
    tokens: Spread | None
    seconds: Spread | None
    """Training time until then; None for replayed runs."""


@dataclass(kw_only=True, eq=False)
class CellResult:
    """A cell of the matrix with its seeds averaged: how its runs stand, their losses and their speed, each
    beside those of other cells."""

    schedule: str
    optimizer: str
    error_feedback: float
    model: str
    axes: Mapping[str, Any]
    """This cell's values of further keys in which cells differ."""
    runs: tuple[RunResult, ...]
    synchronous: bool
    target: float | None = None
    """Validation loss, nats per token, to measure steps and time to."""
    name: str = ""
    """Schedule, optimizer, and the keys in which the cells of the report differ."""
    chosen: tuple[str, ...] = ()
    """Axes whose value was chosen by its result (`--best-over`)."""
    tried: tuple[CellResult, ...] = ()
    """Cells that it was chosen from, itself among them."""
    loss_of: CellResult | None = None
    """For a cell run for its speed alone: the cell whose loss is its own, too, if it is in the report."""

    # Set by `compare`.
    baseline: CellResult | None = None
    """The synchronous counterpart, which differs in schedule and correction alone; None for itself."""
    fastest: CellResult | None = None
    """The synchronous cell of these settings with the most tokens per second; None for itself."""
    uncorrected: CellResult | None = None
    """The cell that differs only in having no correction; None for itself."""
    gap_pairs: Pairs = NO_PAIRS
    """This cell's losses paired with those of the synchronous counterpart."""
    throughput_ratio: float | None = None
    """Tokens per second, relative to the fastest synchronous cell."""
    throughput_interval: Interval | None = None

    # Set by `compare_with_reference`.
    reference: CellResult | None = None
    """The cell that `--against` names; None for itself."""
    reference_pairs: Pairs = NO_PAIRS
    """This cell's losses paired with those of that cell."""

    def __post_init__(self) -> None:
        self.config = _first_known(run.config for run in self.runs)
        """Configuration of its first run that can be read (they differ in seed and site alone), if any."""
        self.settings = settings_of(self.runs[0].axes if self.config is None else self.config)
        """What tells it apart from other cells; its axes, if no configuration can be read."""
        self.completed = [run for run in self.runs if run.state == "completed"]
        """The runs that the means are taken over."""
        self.losses = by_seed(self.completed, VAL_LOSS)
        """Validation loss by seed."""
        self.val_loss = self.spread(VAL_LOSS)
        self.tokens_per_second = self.spread(attrgetter("tokens_per_second"))
        self.bubble = self.spread(attrgetter("bubble"))

    def compare(
        self, *, baseline: CellResult | None, fastest: CellResult | None, uncorrected: CellResult | None
    ) -> None:
        """Set the cells that this one is compared with, and what follows from them."""
        self.baseline, self.fastest, self.uncorrected = baseline, fastest, uncorrected
        self.gap_pairs = self.compared(VAL_LOSS)
        if fastest is not None:
            self.throughput_ratio, self.throughput_interval = _speedup(self, fastest)

    def compare_with_reference(self, reference: CellResult) -> None:
        """Set the cell that `--against` names."""
        self.reference, self.reference_pairs = reference, pairs(self.losses, reference.losses)

    # What the cell is.

    def value(self, key: str) -> Any:
        """The value of a configuration key or axis; None if unknown."""
        return next((run for run in self.runs if run.config is not None), self.runs[0]).value(key)

    def without(self, *names: str) -> Settings:
        """Its settings without those of these keys and sections."""
        return self.settings - only(self.settings, *names)

    @property
    def steps(self) -> int:
        """Steps of a run of the cell; 0 if unknown."""
        return int(self.value("train.steps") or 0)

    @property
    def batch(self) -> int:
        """Sequences per step."""
        factors = ("schedule.microbatches", "train.microbatch_size", "parallel.data")
        return math.prod(int(self.value(key) or 1) for key in factors)

    @property
    def sequences(self) -> int:
        """Sequences that a run of the cell trains on."""
        return self.steps * self.batch

    @property
    def arm(self) -> str:
        """Its schedule, optimizer and correction."""
        return _name(self, (), named={"schedule", "optimizer", "error_feedback"})

    @property
    def correction(self) -> str | None:
        """The correction other than error feedback; None without one."""
        name = _first_known(run.value("correction.name") for run in self.runs)
        return None if name in (None, "none") else str(name)

    @property
    def corrected(self) -> bool:
        return self.error_feedback != 0 or self.correction is not None

    @property
    def speed_only(self) -> bool:
        """Whether its runs are too short for a loss of their own (`speed_steps` of a template)."""
        return all(run.loss_of is not None for run in self.runs)

    def uses(self, key: str) -> bool:
        """Whether the cell's schedule and corrections use a setting."""
        if key.startswith("correction.") and key != "correction.name":
            return self.correction is not None
        if key.startswith("error_feedback."):
            return self.error_feedback != 0
        schedule = KNOWN.get(self.schedule)
        if schedule is None:
            return True
        option = key.removeprefix("schedule.")
        if option in ("replicas", "keep_weights", "reduce_each"):
            return schedule.sharded and (option != "replicas" or schedule.name == "hsdp")
        return option not in OPTIONS or option in schedule.options

    # How its runs stand; the means below are over the completed ones.

    @property
    def state(self) -> str:
        return min((run.state for run in self.runs), key=STATES_BY_WEIGHT.index)

    @property
    def progress(self) -> float | None:
        """Share of the cell's steps that are done; None if no run has begun."""
        known = [1.0 if run.state == "completed" else run.progress for run in self.runs]
        begun = [share for share in known if share is not None]
        return sum(begun) / len(self.runs) if begun else None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why runs failed, were interrupted or cannot be read, each with the run's id first."""
        return tuple(f"{run.id}: {run.state}: {run.reason}" for run in self.runs if run.reason is not None)

    @property
    def n(self) -> int:
        """Number of completed runs."""
        return len(self.completed)

    @property
    def diverged(self) -> list[Any]:
        """Seeds whose run diverged: means over the others are of the survivors."""
        return [run.value("seed") for run in self.runs if run.diverged]

    @property
    def cost(self) -> Cost | None:
        """Cost of all runs and all their attempts."""
        return total(run.cost for run in self.runs)

    def spread(self, number: Number) -> Spread | None:
        """Mean and deviation over the seeds."""
        return spread(map(number, self.completed))

    # Its losses.

    @property
    def unigram_bits_per_byte(self) -> float | None:
        return _first_known(run.unigram_bits_per_byte for run in self.completed)

    @property
    def sets(self) -> list[str]:
        """Names of the validation sets, if there are several."""
        return list(dict.fromkeys(name for run in self.completed for name in run.sets))

    # Its losses beside those of the synchronous counterpart.

    def compared(self, loss: Number) -> Pairs:
        """A loss of this cell paired with that of its synchronous counterpart; none if one has none."""
        if self.baseline is None:
            return NO_PAIRS
        return pairs(*(by_seed(cell.completed, loss) for cell in (self, self.baseline)))

    @property
    def gap(self) -> float | None:
        """Validation loss minus that of the synchronous counterpart, in nats per token.

        The mean over their common seeds; None without any.
        """
        return self.gap_pairs.mean

    @property
    def recovered(self) -> float | None:
        """Share of the uncorrected cell's gap that this cell closes, over the seeds of all three cells.

        None if the uncorrected gap is not above zero, or its interval holds zero.
        """
        if self.uncorrected is None or self.baseline is None:
            return None
        seeds = self.losses.keys() & self.uncorrected.losses.keys() & self.baseline.losses.keys()
        baseline = {seed: self.baseline.losses[seed] for seed in seeds}
        uncorrected = pairs({seed: self.uncorrected.losses[seed] for seed in seeds}, baseline)
        corrected = pairs({seed: self.losses[seed] for seed in seeds}, baseline)
        if uncorrected.mean is None or corrected.mean is None or not uncorrected.mean > 0:
            return None
        if uncorrected.interval is not None and uncorrected.interval.holds_zero:
            return None
        return (uncorrected.mean - corrected.mean) / uncorrected.mean

    # Its updates.

    @property
    def delay(self) -> int | None:
        known = (run.delay for run in self.completed)
        return max((delay for delay in known if delay is not None), default=None)

    @property
    def updates_per_step(self) -> float | None:
        """Updates of a stage per step: 1, or more where stages update on their own."""
        schedule, microbatches = KNOWN.get(self.schedule), self.value("schedule.microbatches")
        if schedule is None or not isinstance(microbatches, int):
            return None
        if schedule.default_interval is None:
            return 1.0
        asked = self.value("schedule.update_interval")
        interval = asked if isinstance(asked, int) else schedule.default_interval(microbatches)
        return microbatches / interval

    @property
    def update_ratio(self) -> float | None:
        """Updates on the same tokens, relative to the synchronous counterpart."""
        own, base = self.updates_per_step, self.baseline.updates_per_step if self.baseline else None
        return own / base if own is not None and base else None

    # Its speed.

    @property
    def speed_deviation(self) -> float | None:
        """Sample standard deviation of tokens per second over the segments of all runs; None for one."""
        over_segments = spread(rate for run in self.completed for rate in _rates(run))
        return over_segments.std if over_segments is not None else None

    @property
    def speed_interval(self) -> Interval | None:
        """Interval of the tokens per second, from logarithms over seeds; of one seed, over its segments.

        None for one number. Around the mean: it is no plain mean of segments of different lengths.
        """
        if self.tokens_per_second is None or self.tokens_per_second.mean <= 0:
            return None
        speeds = [math.log(known) for run in self.completed if (known := positive_speed(run))]
        interval = paired(speeds if len(speeds) > 1 else _log_rates(self.completed))
        return None if interval is None else interval.as_factors(self.tokens_per_second.mean)

    @property
    def bubble_predicted(self) -> float | None:
        return _first_known(run.prediction and run.prediction.bubble for run in self.runs)

    @property
    def busy_by_rank(self) -> list[float]:
        """For each rank the share of the steady state in which it did not wait, mean over the seeds."""
        waited = _by_rank(run.bubble_by_rank for run in self.completed)
        return [1 - sum(shares) / len(shares) for shares in waited]

    @property
    def least_even(self) -> RunResult | None:
        """The completed run whose ranks are least even; None where no times were measured."""

        def unevenness(run: RunResult) -> float:
            found = run.slowest
            return 0.0 if found is None else found.ratio * (found.peer_ratio or 1)

        return max(filter(unevenness, self.completed), key=unevenness, default=None)

    @property
    def slowest(self) -> Slowest | None:
        """Where the ranks of that run wait."""
        return None if self.least_even is None else self.least_even.slowest

    # Its speed beside that of the fastest synchronous cell.

    @property
    def throughput_bound(self) -> float | None:
        """The largest `throughput_ratio` that removing the bubble allows, by the simulator.

        With stages of equal cost: where one takes longer than the others, both schedules wait for it, and the
        bubble is a smaller share of the step.
        """
        own, base = self.bubble_predicted, self.fastest.bubble_predicted if self.fastest else None
        return (1 - own) / (1 - base) if own is not None and base is not None and base < 1 else None

    @property
    def is_too_fast(self) -> bool:
        """Whether the ratio, with its interval, is above what the bubble allows."""
        ratio, bound = self.throughput_ratio, self.throughput_bound
        if ratio is None or bound is None:
            return False
        return (ratio if self.throughput_interval is None else self.throughput_interval.low) > bound

    # The time to a target loss.

    @property
    def reached(self) -> TargetReached | None:
        """When the target was reached; None without a target, a completed run or a loss."""
        done = self.completed
        if self.target is None or not done or self.speed_only:
            return None
        first = [run.first_at(self.target) for run in done]
        known = [evaluation for evaluation in first if evaluation is not None]
        reached = known if len(known) == len(done) else []
        timed = [] if any(run.replayed for run in done) else reached
        return TargetReached(
            runs=len(known),
            of=len(done),
            steps=spread(evaluation.step for evaluation in reached),
            tokens=spread(evaluation.tokens for evaluation in reached),
            seconds=spread(evaluation.seconds for evaluation in timed),
        )

    @property
    def time_to_target_ratio(self) -> float | None:
        """Training time of the synchronous counterpart to the target, relative to this cell's."""
        own, base = self.reached, self.baseline.reached if self.baseline else None
        if own is None or base is None or own.seconds is None or base.seconds is None:
            return None
        return base.seconds.mean / own.seconds.mean if own.seconds.mean > 0 else None

    # Its memory and the load of its experts.

    @property
    def peak_memory(self) -> list[float]:
        """Bytes of each rank of the pipeline, the largest over the seeds."""
        return [max(peaks) for peaks in _by_rank(run.peak_memory for run in self.completed)]

    @property
    def load_by_block(self) -> list[float]:
        """Load, largest over mean, of each block of experts, mean over the seeds."""
        loads = _by_rank(run.load_by_block for run in self.completed)
        return [sum(by_seed) / len(by_seed) for by_seed in loads]


def _speedup(cell: CellResult, fastest: CellResult) -> tuple[float | None, Interval | None]:
    """Tokens per second of a cell, relative to another one, with the interval from their logarithms.

    Over the seeds of both if there are two, which are launched one soon after the other; else over all, with
    the interval from the segments, whose variation over time is all that one seed shows.
    """
    own, base = by_seed(cell.completed, positive_speed), by_seed(fastest.completed, positive_speed)
    both = [(own[seed], base[seed]) for seed in own if seed in base]
    interval = paired([math.log(first) - math.log(second) for first, second in both])
    if interval is not None:
        own_speeds, base_speeds = zip(*both, strict=True)
        return fmean(own_speeds) / fmean(base_speeds), interval.exp
    mean, other = cell.tokens_per_second, fastest.tokens_per_second
    if mean is None or other is None or not other.mean > 0:
        return None, None
    ratio = mean.mean / other.mean
    samples = [spread(_log_rates(each.completed)) for each in (cell, fastest)]
    over_segments = welch(samples[0], samples[1]) if ratio and samples[0] and samples[1] else None
    return ratio, None if over_segments is None else over_segments.as_factors(ratio)


def _first_known(values: Iterable[_Value | None]) -> _Value | None:
    """The first that is not None; None without any."""
    return next((value for value in values if value is not None), None)


def _rates(run: RunResult) -> list[float]:
    return [rate for rate in run.tokens_per_second_by_segment if rate > 0]


def _log_rates(runs: Iterable[RunResult]) -> list[float]:
    return [math.log(rate) for run in runs for rate in _rates(run)]


def _by_rank(runs: Iterable[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """The values of all runs for each rank, from those of all ranks for each run; empty ones are left out."""
    return list(zip(*(values for values in runs if values), strict=False))


def arm_names(cells: Sequence[CellResult], *, without: Sequence[str] = ()) -> list[str]:
    """A name for each cell: schedule, optimizer, and the keys in which the cells differ.

    Args:
        cells: to name.
        without: keys to leave out.
    """
    left_out = {*without, "correction.name"}
    keys = [key for key in (cells[0].axes if cells else ()) if key not in left_out]
    varying = [key for key in keys if len({repr(cell.axes.get(key)) for cell in cells}) > 1]
    named = {"schedule", "optimizer", "error_feedback"} - left_out
    if "model" not in left_out and len({cell.model for cell in cells}) > 1:
        named.add("model")
    return [_name(cell, varying, named=named) for cell in cells]


def _name(cell: CellResult, keys: Sequence[str], *, named: Collection[str]) -> str:
    """A cell's name: those of schedule, optimizer, error feedback and model that are `named`, its correction,
    and the values of `keys`."""
    parts = [
        value for key, value in (("schedule", cell.schedule), ("optimizer", cell.optimizer)) if key in named
    ]
    if cell.error_feedback and "error_feedback" in named:
        parts.append("EF" if cell.error_feedback == 1 else f"EF {cell.error_feedback:g}")
    if cell.correction is not None:
        parts.append(cell.correction)
    if "model" in named:
        parts.append(cell.model)
    values = {key: cell.axes.get(key) for key in keys if cell.uses(key)}
    parts += [
        f"{key.rpartition('.')[2]} {value_text(value)}" for key, value in values.items() if value is not None
    ]
    return " ".join(parts)


def value_text(value: Any) -> str:
    """A configuration value in a few characters."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def memory_unit(cells: Iterable[CellResult]) -> tuple[int, str]:
    """Bytes and name of the unit of the cells' memory: MiB where no rank held a GiB."""
    largest = max((peak for cell in cells for peak in cell.peak_memory), default=0)
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")


def by_seed(runs: Iterable[RunResult], number: Number) -> dict[Any, float]:
    """The number of each seed; the mean of several runs with one seed."""
    numbers: dict[Any, list[float]] = {}
    for run in runs:
        seed, value = run.value("seed"), number(run)
        if seed is not None and value is not None:
            numbers.setdefault(seed, []).append(value)
    return {seed: fmean(values) for seed, values in numbers.items()}
