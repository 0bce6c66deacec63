"""What is tuned over, the points to try, and the plan of a tuning: arms, candidates, rungs of their budget.

EXPERIMENT/tune.json holds it. It says what is tried and when candidates are compared; how they do is in their
runs' own folders alone.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asyncpp_cli.base.atomic_files import write_json
from asyncpp_cli.base.errors import DamagedError, UserError
from asyncpp_cli.experiment.matrix import ResolvedCell
from asyncpp_cli.experiment.template import SHORTHANDS, Settings, Template, canonical, parse_setting
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.run_folder import FORMAT, RunId
from asyncpp_cli.runs.settings import SettingError, refused_at, typed
from stages.config.records import read_record
from stages.config.segments import pauses_exactly

PLAN_FILE = "tune.json"

Point = Mapping[str, Any]
"""A value for each key that is tuned over."""

_ACCEPTED = "accepted: KEY=LOW:HIGH, KEY=LOW:HIGH:log, or KEY=[A,B,C]"
_DIGITS = 3
"""Significant digits of a value from a range: finer differences are the same setting."""
_DRAWS = 100
"""Draws for each point; fewer are needed unless the range has too few values."""


@dataclass(frozen=True, kw_only=True)
class Over:
    """A key that is tuned over: a range of numbers, or a list of values."""

    key: str
    values: tuple[Any, ...] = ()
    """Empty for a range."""
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def at(self, share: float) -> Any:
        """The value at a share of the range, in 0..1, rounded to three digits."""
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return _accepted(self.key, float(f"{value:.{_DIGITS}g}"))


def parse_over(text: str) -> Over:
    """Read `KEY=LOW:HIGH`, `KEY=LOW:HIGH:log` or `KEY=[A,B,C]`.

    Raises:
        UserError: it is none of these, or the key does not accept the values.
    """
    given, equals, range_or_list = text.partition("=")
    key = canonical(given.strip())
    if not equals or not key:
        raise UserError(f"--over {text!r}: {_ACCEPTED}")
    if range_or_list.lstrip().startswith("["):
        values = parse_setting(given, range_or_list)
        if not isinstance(values, list) or not values:
            raise UserError(f"--over {text!r}: {_ACCEPTED}")
        if len({repr(value) for value in values}) < len(values):
            raise UserError(f"--over {text!r}: a value is given twice")
        return Over(key=key, values=tuple(_accepted(key, value) for value in values))
    low, high, *scale = range_or_list.split(":")[:4] if ":" in range_or_list else ("", "")
    try:
        over = Over(key=key, low=float(low), high=float(high), log=scale == ["log"])
    except ValueError:
        raise UserError(f"--over {text!r}: {_ACCEPTED}") from None
    if scale not in ([], ["log"]) or not (math.isfinite(over.low) and over.low < over.high < math.inf):
        raise UserError(f"--over {text!r}: LOW must be less than HIGH, and `log` may follow; {_ACCEPTED}")
    if over.log and over.low <= 0:
        raise UserError(f"--over {text!r}: a range in the logarithm begins above 0")
    for share in (0.0, 1.0):
        over.at(share)
    return over


def points(overs: Sequence[Over], *, samples: int, search_seed: int | None) -> list[Point]:
    """The points to try, the same for every arm.

    Args:
        overs: keys to tune over.
        samples: values of each range or, with a seed, points in all.
        search_seed: draws the points at random, evenly in each range; None: a grid, the product of `samples`
            evenly spaced values of each range and of the lists.

    Raises:
        UserError: a key is given twice, or a range has fewer values.
    """
    keys = [over.key for over in overs]
    if duplicates := sorted({key for key in keys if keys.count(key) > 1}):
        raise UserError(f"--over {duplicates[0]} is given twice")
    if search_seed is not None:
        return _drawn(overs, samples=samples, seed=search_seed)
    axes = [list(over.values) or _spaced(over, samples) for over in overs]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*axes)]


def _spaced(over: Over, samples: int) -> list[Any]:
    values = [over.at(index / max(1, samples - 1)) for index in range(samples)]
    if len(set(values)) < samples:
        raise UserError(f"--over {over.key}: the range has fewer than {samples} values; give fewer --samples")
    return values


def _drawn(overs: Sequence[Over], *, samples: int, seed: int) -> list[Point]:
    chance = random.Random(seed)
    drawn: dict[str, Point] = {}
    for _ in range(_DRAWS * samples):
        # One number for each key, whatever its kind, so that further keys leave the first ones' values.
        shares = [chance.random() for _ in overs]
        point = {
            over.key: over.values[int(share * len(over.values))] if over.values else over.at(share)
            for over, share in zip(overs, shares, strict=True)
        }
        drawn.setdefault(repr(point), point)
        if len(drawn) == samples:
            return sorted(drawn.values(), key=lambda point: [_order(value) for value in point.values()])
    raise UserError(f"--over: there are fewer than {samples} points to try; give fewer --samples")


def _order(value: Any) -> tuple[bool, float, str]:
    """A key to sort by: numbers first."""
    is_number = isinstance(value, int | float)
    return not is_number, value if is_number else 0.0, str(value)


def _accepted(key: str, value: Any) -> Any:
    """The value as its key takes it; a number is rounded where it takes integers.

    Raises:
        UserError: the key is unknown, or does not accept it.
    """
    dotted = SHORTHANDS.get(key, key)
    if key == "model" or (key == "error_feedback" and isinstance(value, bool)):
        return value
    with refused_at("--over "):
        try:
            return typed(dotted, value)
        except SettingError:
            if not isinstance(value, float):
                raise
            return typed(dotted, round(value))


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a tuning was asked for; the same question on the same folder goes on with it."""

    template: str
    changes: tuple[str, ...]
    over: tuple[str, ...]
    """Ranges as the user wrote them: `optimizer.lr=1e-4:1e-1:log`."""
    samples: int
    search_seed: int | None
    eta: int
    """One in `eta` candidates goes on from a rung."""
    rungs: tuple[float, ...]
    """Shares of all steps after which candidates are compared before the end; empty: a plain grid."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A point to try in an arm: the runs that have it, one for each seed."""

    values: Point
    runs: tuple[RunId, ...]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Cells that differ in the tuned keys and the seed alone."""

    axes: Mapping[str, Any]
    """The other axes."""
    rungs: tuple[int, ...]
    """Steps after which its candidates are compared; the last ones are all steps."""
    candidates: tuple[Candidate, ...]

    @property
    def grid_steps(self) -> int:
        """Steps of all runs trained to the end."""
        return self.rungs[-1] * sum(len(candidate.runs) for candidate in self.candidates)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A tuning."""

    question: Question
    keys: tuple[str, ...]
    """That are tuned over."""
    arms: tuple[Arm, ...]


def template_with_points(template: Template, tried: Sequence[Point]) -> Template:
    """The template with a cell for every point in each of its arms.

    Where the template itself sets a tuned key for some cells, these settings are dropped.
    """
    keys = list(tried[0])
    group = {key: [point[key] for point in tried] for key in keys}
    overrides = [replace(override, set=_without(override.set, keys)) for override in template.overrides]
    return replace(
        template,
        base=_without(template.base, keys),
        matrix=_without(template.matrix, keys),
        zip=[rest for rest in (_without(axes, keys) for axes in template.zip) if rest] + [group],
        include=[_without(cell, keys) | dict(point) for cell in template.include for point in tried],
        exclude=[condition for condition in template.exclude if not condition.keys() & set(keys)],
        overrides=[override for override in overrides if override.set],
    )


def _without(settings: Settings, keys: Sequence[str]) -> Settings:
    return {key: value for key, value in settings.items() if key not in keys}


def plan_of(question: Question, cells: Sequence[ResolvedCell], tried: Sequence[Point]) -> Plan:
    """The plan for the cells of a template with points.

    Raises:
        UserError: there is nothing to choose from, or a key that cannot be tuned.
    """
    if len(tried) < 2:
        raise UserError("there is one point to try, and nothing to choose from; give more --samples")
    keys = list(tried[0])
    for key in {"train.steps", "seed"}.intersection(keys):
        # Candidates are compared after the same steps, by their means over seeds.
        raise UserError(f"--over {key} cannot be tuned; accepted: an axis, matrix.{key}=[...]")
    by_arm: dict[str, list[ResolvedCell]] = {}
    for resolved in cells:
        by_arm.setdefault(repr(_arm_axes(resolved, keys)), []).append(resolved)
    aligned = any(_is_drain_felt(resolved, question, len(tried)) for resolved in cells)
    arms = []
    for of_arm in by_arm.values():
        candidates: dict[str, list[ResolvedCell]] = {}
        for resolved in of_arm:
            candidates.setdefault(repr([resolved.cell.axes[key] for key in keys]), []).append(resolved)
        train = of_arm[0].config.train
        interval = train.eval_interval if aligned else 1
        arms.append(
            Arm(
                axes=_arm_axes(of_arm[0], keys),
                rungs=_rungs(question, steps=train.steps, candidates=len(candidates), interval=interval),
                candidates=tuple(
                    Candidate(
                        values={key: group[0].cell.axes[key] for key in keys},
                        runs=tuple(resolved.cell.id for resolved in group),
                    )
                    for group in candidates.values()
                ),
            )
        )
    return Plan(question=question, keys=tuple(keys), arms=tuple(arms))


def _arm_axes(resolved: ResolvedCell, keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in resolved.cell.axes.items() if key not in (*keys, "seed")}


def _is_drain_felt(resolved: ResolvedCell, question: Question, candidates: int) -> bool:
    """Whether a pause at a rung would change the run's numbers."""
    config = resolved.config
    rungs = _rungs(question, steps=config.train.steps, candidates=candidates, interval=1)
    return not all(pauses_exactly(config, step=step) for step in rungs)


def _rungs(question: Question, *, steps: int, candidates: int, interval: int) -> tuple[int, ...]:
    """Steps of each rung, ending with all steps; without rungs at which one candidate is left.

    Args:
        question: of the tuning.
        steps: of the whole run.
        candidates: number of points.
        interval: steps between places where a run may pause.
    """
    rungs = {steps}
    for level, share in enumerate(question.rungs):
        if survivors(candidates, eta=question.eta, level=level) > 1:
            rungs.add(min(steps, -(-max(1, int(steps * share)) // interval) * interval))
    return tuple(sorted(rungs))


def survivors(candidates: int, *, eta: int, level: int) -> int:
    """Number of candidates that train to a rung, the first one being 0."""
    return max(1, -(-candidates // int(eta**level)))


@dataclass(frozen=True, kw_only=True)
class Rung:
    """What a tuning trains to one of its rungs, over all arms, if no run fails."""

    rung: int
    """From 1."""
    runs: int
    until: str
    """Steps of each run in all; several if arms have different numbers of steps."""
    steps: int
    """To train from the rung before."""


def budget(plan: Plan) -> list[Rung]:
    """The rungs of a tuning."""
    rungs = []
    for level in range(max(len(arm.rungs) for arm in plan.arms)):
        runs = steps = 0
        for arm in plan.arms:
            if level >= len(arm.rungs):
                continue
            left = survivors(len(arm.candidates), eta=plan.question.eta, level=level)
            of_arm = sum(len(candidate.runs) for candidate in arm.candidates[:left])
            runs += of_arm
            steps += of_arm * (arm.rungs[level] - (arm.rungs[level - 1] if level else 0))
        until = sorted({arm.rungs[level] for arm in plan.arms if level < len(arm.rungs)})
        rungs.append(Rung(rung=level + 1, runs=runs, until=", ".join(map(str, until)), steps=steps))
    return rungs


def expected_steps(plan: Plan) -> dict[str, int]:
    """Steps by run, if in each arm the first candidates were the best: as many in all as the tuning takes."""
    steps: dict[str, int] = {}
    for arm in plan.arms:
        for level, until in enumerate(arm.rungs):
            left = survivors(len(arm.candidates), eta=plan.question.eta, level=level)
            steps |= {run: until for candidate in arm.candidates[:left] for run in candidate.runs}
    return steps


def write_plan(experiment: Experiment, plan: Plan) -> None:
    """Write tune.json."""
    write_json(experiment.folder / PLAN_FILE, {"format": FORMAT} | asdict(plan))


def plan_in(folder: Path) -> Plan:
    """The plan in an experiment's folder.

    Raises:
        UserError: it is not tuned, or the plan cannot be read.
    """
    plan = read_plan(folder)
    if plan is None:
        raise UserError(f"{folder} is not tuned: it has no {PLAN_FILE}")
    return plan


def read_plan(folder: Path) -> Plan | None:
    """The plan in an experiment's folder; None if it is not tuned.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return read_record(folder / PLAN_FILE, Plan)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        raise UserError(str(error)) from error
