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

from asyncpp_cli.base.console import command
from asyncpp_cli.experiment.template import SHORTHANDS
from asyncpp_cli.report.analysis.aggregate import CORRECTION, LENGTH
from asyncpp_cli.report.analysis.cells import FEW_SEEDS, CellResult, by_seed, positive_speed
from asyncpp_cli.report.analysis.conditions import busy_text
from asyncpp_cli.report.analysis.statistics import (
    CONFIDENCE,
    MOST_FACTOR,
    Interval,
    paired,
    pairs,
    t_quantile,
)
from asyncpp_cli.report.analysis.steps_to_loss import NoRatioError, StepsRatio, steps_ratio, time_interval
from asyncpp_cli.report.load.run import Settings, grouped, only
from asyncpp_cli.runs.experiment_folder import whole_template
from schedules import KNOWN
from stages.update.lr_schedule import SCHEDULES

PAYS, DOES_NOT_PAY, UNDECIDED = "pays", "does not pay", "undecided"

_LAYOUT = ("schedule.", "parallel.", "train.microbatch_size")
"""Keys and sections in which synchronous arms may differ: the loss follows from the tokens per step alone."""

_MOST_SENTENCES = 4

EXAMPLE = "`asyncpp sweep verdict --out verdict && asyncpp launch verdict` runs an experiment for it."
"""Where no arm was run in several lengths."""

_NO_SYNCHRONOUS_ARM = (
    "No verdict: no synchronous arm of the same model, data, tokens per step and number of ranks has a loss."
)
_CHOSEN_ON_THE_SAME_SEEDS = (
    "The best settings were chosen on the seeds that are compared, so the intervals are too narrow: choose "
    "them on other seeds (asyncpp tune)."
)

_UNIT_ROUNDOFF = {"float64": 2**-53, "float32": 2**-24, "bfloat16": 2**-9}
_MOST_ROUNDING = 0.01
"""Share of a loss beyond which a difference is no rounding, in any precision."""

_MOST_SEEDS = 64
"""Limit of the search for the number of seeds that would decide."""


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
    """A delayed arm compared with a synchronous one."""

    delayed: CellResult
    """The arm's longest cell."""
    synchronous: CellResult
    """The cell whose loss is to be reached."""
    fastest: CellResult | None
    """The fastest synchronous cell of that optimizer; None if no throughput was measured."""
    steps: StepsRatio | None = None
    speed: Speed | None = None
    reason: str | None = None
    """What is missing for an answer; None if nothing is."""
    setting: str | None = None
    """Setting of the experiment that would train what is missing."""
    unfinished: int = 0
    """Runs of the two arms that are not complete."""
    unfinished_in: tuple[Path, ...] = ()
    """Their experiments."""
    lengths: tuple[CellResult, ...] = ()
    """The cells of the delayed arm that have a loss."""
    timed: tuple[CellResult, ...] = ()
    """The cells that give its speed: of a synchronous arm of another batch, its fastest."""
    compared: tuple[str, ...] = ()
    """The synchronous schedules that were run, if one of them is no pipeline."""
    synchronous_lengths: tuple[CellResult, ...] = ()
    """The cells of the synchronous arm, of all its schedules, that have a loss."""

    @property
    def time(self) -> float | None:
        """Time to the loss over the synchronous time; None if steps or speed are unknown."""
        return None if self.steps is None or self.speed is None else self.steps.ratio / self.speed.ratio

    @property
    def interval(self) -> tuple[float, float] | None:
        """Interval of `time`, at level `CONFIDENCE`; None if one side is open."""
        return self._interval(errors=1.0)

    def _interval(self, *, errors: float) -> tuple[float, float] | None:
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
        for seeds in range(n + 1, _MOST_SEEDS + 1):
            narrower = self._interval(errors=_reach(seeds) / _reach(n))
            if narrower is not None and not narrower[0] <= 1 <= narrower[1]:
                return seeds
        return None

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        reached = f"the loss of {self.synchronous.arm} ({_steps(self.synchronous):,} steps)"
        if self.steps is None or self.speed is None or self.time is None or self.fastest is None:
            command = f" {self._command}" if self.setting is not None or self.unfinished else ""
            return (
                f"Not answered: whether {self.delayed.arm} reaches {reached} sooner: {self.reason}.{command}"
            )
        bounds = ""
        if self.interval is not None:
            told = not Interval(low=self.interval[0], high=self.interval[1]).says_nothing
            between = f"{self.interval[0]:.2f} to {self.interval[1]:.2f}"
            bounds = f" ({between if told else f'its interval spans more than a factor of {MOST_FACTOR:g}'})"
        ends = [
            f"{'?' if bound is None else format(bound, '.2f')}" for bound in (self.steps.low, self.steps.high)
        ]
        among = f" (over {', '.join(self.compared)} as measured here)" if self.compared else ""
        text = (
            f"{self.delayed.arm} reaches {reached} in {self.time:.2f}{bounds} of the time of the fastest "
            f"synchronous schedule that was run, {self.fastest.schedule}{among}: {self.steps.ratio:.2f} "
            f"({' to '.join(ends)}) times the tokens, {self.speed.ratio:.2f} times as many per second; "
            f"{len(self.steps.seeds)} seeds"
        )
        if busy := busy_text([*self.timed, self.fastest]):
            text = f"{text}. {busy}"
        if self.answer != UNDECIDED:
            return f"{self.answer.capitalize()}: {text}."
        return f"The runs cannot tell: {text}. {self._remedy(self.steps, self.speed)}"

    def _remedy(self, steps: StepsRatio, speed: Speed) -> str:
        if self.unfinished:
            return f"{self.unfinished:,} of the runs are not complete: {self._command}"
        if self.setting is not None:
            why = "The losses between the lengths are not known well enough"
            if len(steps.seeds) < FEW_SEEDS:
                why = "Two seeds say little"
            elif steps.low is None or steps.high is None:
                why = "The interval reaches beyond the lengths of the runs"
            return f"{why}: {self._command}"
        if speed.logarithm is None:
            return "The speed has fewer than two pairs of runs with one seed: measure that of more seeds."
        seeds = self.seeds_to_decide
        if seeds is None:
            return f"The time is about the same: {_MOST_SEEDS} seeds would not decide."
        more = self._with(_seeds_setting(self, seeds))
        return f"About {seeds} seeds would decide, if the spread stays: {more}"

    @property
    def _command(self) -> str:
        """The command that trains what is not complete or, of complete runs, what `setting` adds."""
        if self.unfinished or self.setting is None:
            return self._with(None)
        if self.setting.startswith("matrix.train.steps") and _is_branch(self.delayed):
            return f"Extend the trunk (asyncpp extend) to the lengths of {self.setting}."
        return self._with(self.setting)

    @property
    def folder(self) -> Path | None:
        """The experiment of the delayed arm."""
        return next((run.folder.parents[1] for run in self.delayed.runs if run.folder is not None), None)

    def _with(self, setting: str | None) -> str:
        folder = self.folder
        if folder is None:
            return f"`{setting or 'asyncpp launch'}`."
        if setting is None:
            return f"`{' && '.join(map(self.launch, self.unfinished_in or [folder]))}`"
        sweep = command("sweep", whole_template(folder), setting, "--out", folder)
        return f"`{sweep} && {self.launch(folder)}`"

    def launch(self, folder: Path) -> str:
        """The command that launches an experiment where the arm's runs were. A profile that is a path is left
        out: it runs commands, and whoever wrote the folder need not be whom the reader trusts."""
        runs = [run for cell in (self.delayed, *self.lengths) for run in cell.runs]
        sites = [run.site for run in runs if run.site and Path(run.site).name == run.site]
        return command("launch", folder, *(["--site", sites[0]] if sites else []))

    def record(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        return {
            "answer": self.answer,
            "sentence": self.sentence,
            "time_ratio": self.time,
            "time_interval": list(self.interval) if self.interval else None,
            "steps_ratio": self.steps.ratio if self.steps else None,
            "steps_by_curve": list(self.steps.by_curve) if self.steps else None,
            "steps_interval": [self.steps.low, self.steps.high] if self.steps else None,
            "speed_ratio": self.speed.ratio if self.speed else None,
            "synchronous": self.synchronous.arm,
            "synchronous_steps": _steps(self.synchronous),
            "fastest_synchronous": self.fastest.schedule if self.fastest else None,
            "seeds_to_decide": self.seeds_to_decide if self.answer == UNDECIDED else None,
        }


def verdicts(cells: Sequence[CellResult]) -> list[Verdict]:
    """Verdicts on each delayed arm and each synchronous arm of another batch, the shortest time first.

    An arm is compared with the synchronous arm of its own optimizer, and with the one that ends lowest if
    that is another. All have the same model, data and number of ranks. The lengths of an arm are cells that
    differ in `train.steps` (and the intervals of evaluations and checkpoints) alone.
    """
    found = []
    for group in grouped([cell for cell in cells if cell.config], _comparable):
        synchronous = _arms([cell for cell in group if cell.synchronous], layouts=())
        delayed = _arms([cell for cell in group if not cell.synchronous], layouts=(*_LAYOUT, *CORRECTION))
        batches = {arm.batch for arm in delayed}
        for arm in delayed:
            baselines = [base for base in synchronous if base.batch == arm.batch]
            if baselines:
                own = [base for base in baselines if base.optimizer == arm.optimizer]
                best = _best(baselines)
                found += [
                    _verdict(arm.cells, base.cells) for base in [*own, *([] if best in own else [best])]
                ]
        for arm in synchronous:
            baselines = [base for base in synchronous if base.batch in batches]
            if arm.batch not in batches and baselines:
                found.append(_verdict(arm.cells, _best(baselines).cells))
    return sorted(found, key=lambda verdict: verdict.time or math.inf)


class _Arm(NamedTuple):
    """Cells with the same batch and optimizer; delayed ones differ in their lengths alone."""

    cells: list[CellResult]
    batch: int
    """Sequences per step."""
    optimizer: Settings
    layout: Settings


def _arms(cells: Iterable[CellResult], *, layouts: Sequence[str]) -> list[_Arm]:
    """The arms that have a loss; `layouts`: further keys and sections in which arms differ."""
    of_keys: dict[Hashable, _Arm] = {}
    for cell in cells:
        chosen = [SHORTHANDS.get(key, key) for key in cell.chosen]
        optimizer = only(cell.without(*chosen), "optimizer.")
        arm = _Arm([], _batch(cell), optimizer, only(cell.settings, *layouts))
        of_keys.setdefault(arm[1:], arm).cells.append(cell)
    return [arm for arm in of_keys.values() if any(cell.losses for cell in arm.cells)]


def verdict_lines(cells: Sequence[CellResult], found: Sequence[Verdict]) -> tuple[list[str], list[str]]:
    """The verdicts that have a time, in sentences; and if none has, why, with what would answer it."""
    timed = [verdict for verdict in found if verdict.time is not None]
    if timed:
        chosen = [_CHOSEN_ON_THE_SAME_SEEDS] if any(cell.chosen for cell in cells) else []
        return [verdict.sentence for verdict in timed[:_MOST_SENTENCES]] + chosen, []
    if not found and any(not cell.synchronous and cell.losses for cell in cells):
        return [], [_NO_SYNCHRONOUS_ARM]
    # The arms that were run for it.
    several = [verdict for verdict in found if len({_tokens(cell) for cell in verdict.lengths}) > 1]
    if found and not several and not found[0].unfinished:
        return [], [f"{found[0].sentence} {_in_further_lengths(found[0])}"]
    return [], [verdict.sentence for verdict in (several or found[:1])[:_MOST_SENTENCES]]


def _in_further_lengths(verdict: Verdict) -> str:
    """The commands that train what an experiment of one length lacks: its own runs are the middle length."""
    folder = verdict.folder
    if folder is None:
        return EXAMPLE
    if verdict.delayed.chosen:
        # The experiment's template would train all that they were chosen among.
        keys = " and ".join(verdict.delayed.chosen)
        return (
            f"Train each arm with its own {keys}, which overrides of a template set, in three lengths "
            "(matrix.train.steps), on seeds that it was not chosen on."
        )
    steps, out = _steps(verdict.delayed), folder.with_name(f"{folder.name}-lengths")
    lengths = f"matrix.train.steps=[{max(1, steps // 2)},{2 * steps}]"
    sweep = command("sweep", whole_template(folder), lengths, "--out", out)
    return (
        f"`{sweep} && {verdict.launch(out)}` trains half and twice the steps; then "
        f"`{command('report', folder, out)}` answers it, with the runs that are here."
    )


def _comparable(cell: CellResult) -> Hashable:
    """Model, data and number of ranks."""
    continued = ("continues",) * _is_branch(cell)
    return (cell.runs[0].ranks, cell.without("optimizer.", *LENGTH, *_LAYOUT, *CORRECTION, *continued))


def _is_branch(cell: CellResult) -> bool:
    """Whether the runs are decays of a trunk at a constant rate: as good as runs of their length from the
    beginning (arXiv 2405.18392)."""
    parents = [run.lineage.changed.get("optimizer.schedule") for run in cell.runs if run.lineage is not None]
    return bool(parents) and all(
        parent is not None and parent[0] in SCHEDULES and SCHEDULES[parent[0]].constant for parent in parents
    )


def _batch(cell: CellResult) -> int:
    """Sequences per step."""
    factors = ("schedule.microbatches", "train.microbatch_size", "parallel.data")
    return math.prod(int(cell.value(key) or 1) for key in factors)


def _best(arms: Sequence[_Arm]) -> _Arm:
    """The arm with the lowest mean loss, of those with the greatest length."""
    with_loss = [[cell for cell in arm.cells if cell.losses] for arm in arms]
    tokens = max(_tokens(cell) for arm in with_loss for cell in arm)
    longest = [[cell for cell in arm if _tokens(cell) == tokens] for arm in with_loss]
    ends = {place: min(map(_mean, ends)) for place, ends in enumerate(longest) if ends}
    return arms[min(ends, key=lambda place: ends[place])]


def _verdict(arm: Sequence[CellResult], baseline: Sequence[CellResult]) -> Verdict:
    delayed: dict[int, dict[Any, float]] = {}
    with_loss = [cell for cell in arm if cell.losses]
    for cell in with_loss:
        # The layouts of a synchronous arm share their losses: a seed of any will do.
        delayed.setdefault(_tokens(cell), {}).update(cell.losses)
    longest = max(with_loss, key=_tokens)
    fastest = _fastest(baseline)
    quickest = _fastest(arm) if longest.synchronous else None
    timed = list(arm) if quickest is None else [quickest]
    ran = dict.fromkeys(cell.schedule for cell in baseline)
    # The longest synchronous runs whose loss the delayed ones bracket.
    by_length = sorted(
        (cell for cell in baseline if cell.losses),
        key=lambda cell: (_tokens(cell), len(cell.losses)),
        reverse=True,
    )
    unfinished = [run for cell in (*arm, *baseline) for run in cell.runs if run.state != "completed"]
    found = Verdict(
        delayed=longest,
        synchronous=by_length[0],
        fastest=fastest,
        lengths=tuple(with_loss),
        timed=tuple(timed),
        synchronous_lengths=tuple(by_length),
        unfinished=len(unfinished),
        unfinished_in=tuple(dict.fromkeys(run.folder.parents[1] for run in unfinished if run.folder)),
        compared=tuple(ran) if any(name in KNOWN and KNOWN[name].sharded for name in ran) else (),
    )
    if reason := _diverged([*arm, *baseline]) or _unequal(by_length):
        return replace(found, reason=reason, unfinished=0)
    failed: Verdict | None = None
    for cell in by_length:
        try:
            steps = steps_ratio(steps=_tokens(cell), loss=cell.losses, delayed=delayed)
        except NoRatioError as error:
            reason = "not all runs are complete" if found.unfinished else str(error)
            unanswered = replace(found, synchronous=cell, reason=reason)
            failed = failed or replace(unanswered, setting=_setting_of(error, unanswered))
            continue
        speed = _speed(timed, fastest)
        reason = None if speed is not None else _without_speed([*arm, *baseline])
        answered = replace(found, synchronous=cell, steps=steps, speed=speed, reason=reason)
        return replace(answered, setting=_setting_to_decide(answered))
    assert failed is not None
    return failed


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


def _setting_of(error: NoRatioError, verdict: Verdict) -> str | None:
    if error.few_seeds:
        return _seeds_setting(verdict, FEW_SEEDS)
    if not error.lengths:
        return None
    return _lengths_setting(verdict, (sequences / _batch(verdict.delayed) for sequences in error.lengths))


def _setting_to_decide(verdict: Verdict) -> str | None:
    """What more of leaves a verdict undecided no longer: lengths, or seeds where there are two; None where
    the number of seeds can be told (`seeds_to_decide`)."""
    if verdict.answer != UNDECIDED or verdict.steps is None or verdict.speed is None:
        return None
    if len(verdict.steps.seeds) < FEW_SEEDS:
        return _seeds_setting(verdict, FEW_SEEDS)
    run = sorted({_steps(cell) for cell in verdict.lengths})
    if verdict.steps.low is None:
        return _lengths_setting(verdict, (run[0] / factor for factor in (2, math.sqrt(2))))
    if verdict.steps.high is None:
        return _lengths_setting(verdict, (run[-1] * factor for factor in (math.sqrt(2), 2)))
    least, most = (ratio / verdict.speed.ratio for ratio in verdict.steps.by_curve)
    if least <= 1 <= most and least < most:
        loss_at = verdict.steps.ratio * _tokens(verdict.synchronous) / _batch(verdict.delayed)
        return _lengths_setting(verdict, [loss_at])
    return None


def _lengths_setting(verdict: Verdict, further: Iterable[float]) -> str:
    """The setting that adds lengths to an experiment; what it has stays in its matrix."""
    run = {_steps(cell) for cell in (*verdict.lengths, *verdict.synchronous_lengths)}
    return f"matrix.train.steps=[{','.join(map(str, sorted(run | set(map(math.ceil, further)))))}]"


def _seeds_setting(verdict: Verdict, count: int) -> str:
    return seeds_setting((*verdict.lengths, *verdict.synchronous_lengths), count)


def seeds_setting(cells: Iterable[CellResult], count: int) -> str:
    """The setting that gives an experiment so many seeds; those that it has stay in its matrix."""
    seeds = sorted({seed for cell in cells for seed in cell.losses})
    further = range(seeds[-1] + 1, seeds[-1] + 1 + count - len(seeds))
    return f"matrix.seed=[{','.join(map(str, [*seeds, *further]))}]"


def _reach(seeds: int) -> float:
    """Half-width of an interval from so many seeds, in standard deviations."""
    return t_quantile((1 + CONFIDENCE) / 2, seeds - 1) / math.sqrt(seeds)


def _unequal(by_length: Sequence[CellResult]) -> str | None:
    """Schedules of a synchronous arm whose losses differ: then one cannot stand for the others."""
    for first, second in combinations(by_length, 2):
        if _tokens(first) == _tokens(second) and first.schedule != second.schedule:
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
    return _mean(cell) * min(unit * math.sqrt(_steps(cell)), _MOST_ROUNDING)


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


def time_by_loss(verdict: Verdict) -> dict[str, list[tuple[float, list[float]]]]:
    """For the delayed and the synchronous arm, by name: the hours of each length, and its losses by seed.

    The time is that of all tokens at the arm's mean speed; of the synchronous arm, of its fastest schedule.
    Empty without speeds.
    """
    if verdict.fastest is None or not _speeds(verdict.timed):
        return {}
    found: dict[str, list[tuple[float, list[float]]]] = {}
    for name, cells, timed in (
        (verdict.delayed.arm, verdict.lengths, verdict.timed),
        (verdict.synchronous.arm, verdict.synchronous_lengths, [verdict.fastest]),
    ):
        speed = fmean(_speeds(timed).values())
        by_tokens: dict[int, dict[Any, float]] = {}
        for cell in cells:
            by_tokens.setdefault(_tokens(cell) * int(cell.value("data.context") or 0), {}).update(cell.losses)
        found[name] = [
            (tokens / speed / 3600, list(losses.values())) for tokens, losses in sorted(by_tokens.items())
        ]
    return found


def _speeds(cells: Iterable[CellResult]) -> dict[Any, float]:
    """Tokens per second by seed, the mean over the lengths."""
    return by_seed((run for cell in cells for run in cell.completed), positive_speed)


def _steps(cell: CellResult) -> int:
    return int(cell.value("train.steps") or 0)


def _tokens(cell: CellResult) -> int:
    """Tokens of a run of the cell, in sequences."""
    return _steps(cell) * _batch(cell)


def _mean(cell: CellResult) -> float:
    """Mean loss of the cell; infinite if one is not finite."""
    mean = fmean(cell.losses.values())
    return mean if math.isfinite(mean) else math.inf
