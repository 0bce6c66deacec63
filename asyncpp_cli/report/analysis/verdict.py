"""Does asynchrony pay: time to the loss of the best synchronous arm, over that arm's time.

All synchronous schedules of an optimizer have the same loss, so one of them gives the loss, and the fastest
of them the time. A delayed arm needs k times the steps to that loss and makes r times as many tokens per
second: its time is k / r of the synchronous time.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from asyncpp_cli.experiment.template import SHORTHANDS
from asyncpp_cli.report.analysis.aggregate import CORRECTION, LENGTH
from asyncpp_cli.report.analysis.cells import CellResult, by_seed, positive_speed
from asyncpp_cli.report.analysis.statistics import CONFIDENCE, Interval, paired, pairs, t_quantile
from asyncpp_cli.report.analysis.steps_to_loss import NoRatioError, StepsRatio, steps_ratio, time_interval
from asyncpp_cli.report.load.run import Settings, grouped, only
from schedules import KNOWN
from stages.update.lr_schedule import SCHEDULES

PAYS, DOES_NOT_PAY, UNDECIDED = "pays", "does not pay", "undecided"

MOST_SEEDS = 64
"""Limit of the search for the number of seeds that would decide."""

_LAYOUT = ("schedule.", "parallel.", "train.microbatch_size")
"""Keys and sections in which synchronous arms may differ: the loss follows from the tokens per step alone."""

_UNIT_ROUNDOFF = {"float64": 2**-53, "float32": 2**-24, "bfloat16": 2**-9}
_MOST_ROUNDING = 0.01
"""Share of a loss beyond which a difference is no rounding, in any precision."""


def answer_of(low: float | None, high: float | None) -> str:
    """Whether asynchrony pays, by the interval of its time over the synchronous time; None: open there."""
    if high is not None and high < 1:
        return PAYS
    return DOES_NOT_PAY if low is not None and low > 1 else UNDECIDED


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Tokens per second of a delayed arm over those of a synchronous one."""

    ratio: float
    logarithm: Interval | None
    """Interval of the ratio's logarithm, from pairs of runs with one seed; None for fewer than two."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A delayed arm, or a synchronous arm of another batch, compared with a synchronous one."""

    delayed: CellResult
    """The longest cell of the first arm."""
    lengths: tuple[CellResult, ...]
    """The cells of the first arm that have a loss."""
    timed: tuple[CellResult, ...]
    """The cells that give the first arm's speed: all, or the fastest if it is synchronous, too."""
    synchronous: CellResult
    """The cell whose loss is to be reached."""
    synchronous_lengths: tuple[CellResult, ...]
    """The cells of the synchronous arm, of all its schedules, that have a loss; the longest first."""
    fastest: CellResult | None
    """The cell that gives the synchronous arm's speed; None if no throughput was measured."""
    compared: tuple[str, ...]
    """The synchronous schedules that were run, if one of them is no pipeline."""
    unfinished: int
    """Runs of the two arms that are not complete; 0 where completing them would answer nothing."""
    unfinished_in: tuple[Path, ...]
    """The experiments of the runs that are not complete."""
    steps: StepsRatio | None = None
    speed: Speed | None = None
    reason: str | None = None
    """What is missing for an answer; None if nothing is."""
    no_ratio: NoRatioError | None = None
    """Why there is no ratio of steps, with the lengths or seeds that are missing for one."""

    @property
    def time(self) -> float | None:
        """Time to the loss over the synchronous time; None if steps or speed are unknown."""
        return None if self.steps is None or self.speed is None else self.steps.ratio / self.speed.ratio

    @property
    def interval(self) -> tuple[float, float] | None:
        """Interval of `time`, at level `CONFIDENCE`; None if one side is open."""
        return self._interval(errors=1.0)

    def _interval(self, *, errors: float) -> tuple[float, float] | None:
        """Interval of `time`, were the errors over seeds so many times as large."""
        if self.steps is None or self.speed is None or self.speed.logarithm is None:
            return None
        return time_interval(self.steps, self.speed.logarithm, errors=errors)

    @property
    def answer(self) -> str:
        """`pays`, `does not pay` or `undecided`."""
        return UNDECIDED if self.interval is None or self.reason is not None else answer_of(*self.interval)

    @property
    def seeds_to_decide(self) -> int | None:
        """Number of seeds at which the interval would leave 1 out, were its middle and spread the same."""
        if self.interval is None or self.steps is None:
            return None
        n = len(self.steps.seeds)
        for seeds in range(n + 1, MOST_SEEDS + 1):
            narrower = self._interval(errors=_reach(seeds) / _reach(n))
            if narrower is not None and not narrower[0] <= 1 <= narrower[1]:
                return seeds
        return None

    @property
    def is_branch(self) -> bool:
        """Whether the first arm's longest runs are decays of a trunk at a constant rate (`_are_branches`)."""
        return _are_branches(self.delayed)


def _reach(seeds: int) -> float:
    """Half-width of an interval from so many seeds, in standard deviations."""
    return t_quantile((1 + CONFIDENCE) / 2, seeds - 1) / math.sqrt(seeds)


def verdicts(cells: Sequence[CellResult]) -> list[Verdict]:
    """Verdicts on each delayed arm and each synchronous arm of another batch, the shortest time first.

    An arm is compared with the synchronous arm of its own optimizer, and with the one that ends lowest if
    that is another. All have the same model, data and number of ranks. The lengths of an arm are cells that
    differ in `train.steps` (and the intervals of evaluations and checkpoints) alone.
    """
    found = []
    for group in grouped([cell for cell in cells if cell.config], _comparable):
        synchronous = _arms([cell for cell in group if cell.synchronous], apart=())
        delayed = _arms([cell for cell in group if not cell.synchronous], apart=(*_LAYOUT, *CORRECTION))
        batches = {arm.batch for arm in delayed}
        for arm in delayed:
            baselines = [base for base in synchronous if base.batch == arm.batch]
            if baselines:
                own = [base for base in baselines if base.optimizer == arm.optimizer]
                lowest = _lowest(baselines)
                compared = own if lowest in own else [*own, lowest]
                found += [_verdict(arm.cells, base.cells) for base in compared]
        for arm in synchronous:
            baselines = [base for base in synchronous if base.batch in batches]
            if arm.batch not in batches and baselines:
                found.append(_verdict(arm.cells, _lowest(baselines).cells))
    return sorted(found, key=lambda verdict: verdict.time or math.inf)


def _comparable(cell: CellResult) -> Hashable:
    """Model, data and number of ranks of a cell."""
    continued = ("continues",) * _are_branches(cell)
    return (cell.runs[0].ranks, cell.without("optimizer.", *LENGTH, *_LAYOUT, *CORRECTION, *continued))


def _are_branches(cell: CellResult) -> bool:
    """Whether the runs are decays of a trunk at a constant rate: as good as runs of their length from the
    beginning (arXiv 2405.18392)."""
    parents = [run.lineage.changed.get("optimizer.schedule") for run in cell.runs if run.lineage is not None]
    return bool(parents) and all(
        parent is not None and parent[0] in SCHEDULES and SCHEDULES[parent[0]].constant for parent in parents
    )


class _Arm(NamedTuple):
    """Cells with the same batch and optimizer; delayed ones differ in their lengths alone."""

    cells: list[CellResult]
    batch: int
    """Sequences per step."""
    optimizer: Settings
    layout: Settings


def _arms(cells: Iterable[CellResult], *, apart: Sequence[str]) -> list[_Arm]:
    """The arms that have a loss; `apart`: further keys and sections whose settings tell arms apart."""
    of_keys: dict[Hashable, _Arm] = {}
    for cell in cells:
        chosen = [SHORTHANDS.get(key, key) for key in cell.chosen]
        optimizer = only(cell.without(*chosen), "optimizer.")
        arm = _Arm([], cell.batch, optimizer, only(cell.settings, *apart))
        of_keys.setdefault(arm[1:], arm).cells.append(cell)
    return [arm for arm in of_keys.values() if any(cell.losses for cell in arm.cells)]


def _lowest(arms: Sequence[_Arm]) -> _Arm:
    """The arm with the lowest mean loss of those with the greatest length."""
    ends = [(arm, cell) for arm in arms for cell in arm.cells if cell.losses]
    longest = max(cell.sequences for _, cell in ends)
    arm, _ = min((end for end in ends if end[1].sequences == longest), key=lambda end: _mean(end[1]))
    return arm


def _verdict(arm: Sequence[CellResult], baseline: Sequence[CellResult]) -> Verdict:
    """The verdict on an arm, from its cells and those of the synchronous arm that it is compared with."""
    lengths = [cell for cell in arm if cell.losses]
    longest = max(lengths, key=lambda cell: cell.sequences)
    fastest, quickest = _fastest(baseline), _fastest(arm)
    by_length = sorted(
        (cell for cell in baseline if cell.losses),
        key=lambda cell: (cell.sequences, len(cell.losses)),
        reverse=True,
    )
    schedules = dict.fromkeys(cell.schedule for cell in baseline)
    unfinished = [run for cell in (*arm, *baseline) for run in cell.runs if run.state != "completed"]
    found = Verdict(
        delayed=longest,
        lengths=tuple(lengths),
        timed=(quickest,) if longest.synchronous and quickest is not None else tuple(arm),
        synchronous=by_length[0],
        synchronous_lengths=tuple(by_length),
        fastest=fastest,
        compared=tuple(schedules) if any(name in KNOWN and KNOWN[name].sharded for name in schedules) else (),
        unfinished=len(unfinished),
        unfinished_in=tuple(dict.fromkeys(run.folder.parents[1] for run in unfinished if run.folder)),
    )
    if reason := _diverged([*arm, *baseline]) or _unequal(by_length):
        return replace(found, reason=reason, unfinished=0)
    # The longest synchronous runs whose loss the delayed ones bracket; of none, what the longest lack.
    failed: Verdict | None = None
    for cell in by_length:
        try:
            steps = steps_ratio(steps=cell.sequences, loss=cell.losses, delayed=_losses(lengths))
        except NoRatioError as error:
            reason = "not all runs are complete" if unfinished else str(error)
            failed = failed or replace(found, synchronous=cell, reason=reason, no_ratio=error)
            continue
        speed = _speed(found.timed, fastest)
        reason = None if speed is not None else _without_speed([*arm, *baseline])
        return replace(found, synchronous=cell, steps=steps, speed=speed, reason=reason)
    assert failed is not None
    return failed


def _losses(cells: Iterable[CellResult]) -> dict[int, dict[Any, float]]:
    """Losses by length, in sequences, and seed. Layouts of a synchronous arm share theirs: a seed of any will
    do."""
    losses: dict[int, dict[Any, float]] = {}
    for cell in cells:
        losses.setdefault(cell.sequences, {}).update(cell.losses)
    return losses


def _mean(cell: CellResult) -> float:
    """Mean loss of the cell, nats per token; infinite if it is not finite."""
    mean = fmean(cell.losses.values())
    return mean if math.isfinite(mean) else math.inf


def _diverged(cells: Sequence[CellResult]) -> str | None:
    """Runs that diverged, without which k would be a mean of the survivors."""
    for cell in cells:
        if cell.diverged:
            which = ", ".join(map(str, cell.diverged))
            others = ", and the mean of the others would favour it" * (len(cell.diverged) < len(cell.runs))
            return (
                f"{cell.arm} diverged in {len(cell.diverged)} of {len(cell.runs)} seeds (seed "
                f"{which}){others}: lower its optimizer.lr"
            )
    return None


def _unequal(by_length: Sequence[CellResult]) -> str | None:
    """Schedules of a synchronous arm whose losses differ: then one cannot stand for the others."""
    for first, second in combinations(by_length, 2):
        if first.sequences == second.sequences and first.schedule != second.schedule:
            compared = pairs(second.losses, first.losses)
            if compared.interval is None or compared.mean is None or compared.interval.holds_zero:
                continue
            if abs(compared.mean) > _rounding(first):
                return (
                    f"{second.schedule} ends {compared.mean:+.3f} from {first.schedule}, and synchronous "
                    "schedules should have the same loss: compare their settings (asyncpp diff)"
                )
    return None


def _rounding(cell: CellResult) -> float:
    """Difference of losses that sums in another order may make, nats per token: the steps' roundings add up
    like a random walk. What training blows up beyond that differs in sign from seed to seed, and the t test
    sees it."""
    unit = _UNIT_ROUNDOFF[str(cell.value("train.precision") or "float32")]
    return _mean(cell) * min(unit * math.sqrt(cell.steps), _MOST_ROUNDING)


def _without_speed(cells: Iterable[CellResult]) -> str:
    replayed = any(run.replayed for cell in cells for run in cell.completed)
    return "replayed runs have no throughput" if replayed else "no throughput was measured"


def _fastest(arm: Sequence[CellResult]) -> CellResult | None:
    measured = [cell for cell in arm if _speeds([cell])]
    return max(measured, key=lambda cell: fmean(_speeds([cell]).values()), default=None)


def _speed(arm: Sequence[CellResult], fastest: CellResult | None) -> Speed | None:
    if fastest is None:
        return None
    own, base = _speeds(arm), _speeds([fastest])
    if not own or not base:
        return None
    both = own.keys() & base.keys()
    if not both:
        return Speed(ratio=fmean(own.values()) / fmean(base.values()), logarithm=None)
    ratios = [math.log(own[seed] / base[seed]) for seed in sorted(both, key=str)]
    return Speed(ratio=math.exp(fmean(ratios)), logarithm=paired(ratios))


def _speeds(cells: Iterable[CellResult]) -> dict[Any, float]:
    """Tokens per second by seed, the mean over the lengths."""
    return by_seed((run for cell in cells for run in cell.completed), positive_speed)


def time_by_loss(verdict: Verdict) -> dict[str, list[tuple[float, list[float]]]]:
    """For the delayed and the synchronous arm, by name: the hours of each length, and its losses by seed.

    The time is that of all tokens at the arm's mean speed; of the synchronous arm, of its fastest schedule.
    Empty without speeds.
    """
    if verdict.fastest is None or not _speeds(verdict.timed):
        return {}
    context = int(verdict.delayed.value("data.context") or 0)
    found: dict[str, list[tuple[float, list[float]]]] = {}
    for name, cells, timed in (
        (verdict.delayed.arm, verdict.lengths, verdict.timed),
        (verdict.synchronous.arm, verdict.synchronous_lengths, [verdict.fastest]),
    ):
        speed = fmean(_speeds(timed).values())
        found[name] = [
            (sequences * context / speed / 3600, list(losses.values()))
            for sequences, losses in sorted(_losses(cells).items())
        ]
    return found
