"""The charts of a report, each described once: the page, notebooks and figures for papers draw the same.

Curves of runs are thinned to few points without losing extremes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from asyncpp_cli.base.console import printable
from asyncpp_cli.base.tables import printed
from asyncpp_cli.report.analysis.aggregate import arm_settings
from asyncpp_cli.report.analysis.cells import CellResult, arm_names, memory_unit
from asyncpp_cli.report.analysis.statistics import (
    CANNOT_BE_TOLD,
    CONFIDENCE,
    MOST_FACTOR,
    Interval,
    ratio_text,
    spread,
)
from asyncpp_cli.report.analysis.verdict import Verdict, time_by_loss
from asyncpp_cli.report.load.run import grouped
from asyncpp_cli.report.tables.document import Report
from asyncpp_cli.tune.result import Tuning
from asyncpp_cli.tune.standing import ArmStanding
from stages.rows import Evaluation

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Hues for colour-blind readers (Okabe and Ito, 2008), without yellow, which is faint on white."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""plotly's names."""

MARKERS = ("circle", "square", "diamond", "triangle-up", "x")
"""plotly's names; as many as dashes."""

_RAW_BINS = 400
_SMOOTH_BINS = 60
"""Bins whose means make the line of a training loss."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """The look of an arm; the dash and marker serve readers who do not see the colour."""

    colour: str
    dash: str
    marker: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a chart, or a band around one."""

    arm: int
    """Place of its cell in the report."""
    name: str
    colour: str
    dash: str = "solid"
    marker: str | None = None
    x: Sequence[Any]
    y: Sequence[float | None]
    high: Sequence[float | None] | None = None
    """Upper edge of a band, whose lower edge is `y`; None: a line."""
    in_legend: bool = True
    width: float = 1.5
    opacity: float = 1.0
    best: int | None = None
    """Place of a point to mark."""
    diverged_at: Any = None
    """x at which it leaves the chart; None: it stays."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """An arm in a chart of one row per arm."""

    arm: Arm
    values: Sequence[float]
    """One number, or in a grid those of its fields."""
    texts: Sequence[str] = ()
    """The values as text: in the fields of a grid, in a bar."""
    interval: Interval | None = None
    """Around a single value."""
    marks: Sequence[float] = ()
    """Small marks: the value of each seed."""

    @property
    def below(self) -> float | None:
        """Length of the error bar, like `above`."""
        return None if self.interval is None else self.values[0] - self.interval.low

    @property
    def above(self) -> float | None:
        return None if self.interval is None else self.interval.high - self.values[0]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart as the renderers draw it."""

    title: str
    about: str
    """What it shows, in a sentence or two."""
    kind: Literal["lines", "points", "bars", "grid"]
    x: str
    """Title of the axis."""
    y: str = ""
    logarithmic: bool = False
    """Whether the x axis is."""
    y_range: tuple[float, float] | None = None
    """Ends of the y axis, where a line leaves it; None: those of all lines."""
    lines: Sequence[Line] = ()
    rows: Sequence[Row] = ()
    lowest: float | None = None
    highest: float | None = None
    """Values at the ends of a grid's colour scale; None: those of the rows."""

    @property
    def has_data(self) -> bool:
        return bool(self.lines or self.rows)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A cell as charts draw it."""

    place: int
    """In the report."""
    cell: CellResult
    name: str
    style: Style

    def line(self, x: Sequence[Any], y: Sequence[float | None], **further: Any) -> Line:
        """A line in the arm's style; further fields of `Line` replace those of the style."""
        look = {"name": self.name, "dash": self.style.dash, "marker": self.style.marker}
        return Line(arm=self.place, colour=self.style.colour, x=x, y=y, **look | further)

    def faint(self, x: Sequence[Any], y: Sequence[float | None], **further: Any) -> Line:
        """What is drawn behind the arm's line: solid, without marks, not in the legend."""
        return self.line(x, y, dash="solid", marker=None, in_legend=False, **further)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Training loss of a run, in the order of training.

    The first four fields hold rows of the run: all of them, or the first minimum and maximum of each bin with
    the run's first and last row. The means are over the same bins.
    """

    steps: NDArray[np.int64]
    tokens: NDArray[np.int64]
    seconds: Floats
    losses: Floats
    mean_steps: Floats
    mean_losses: Floats
    bin_size: int
    """Rows in a bin; 1: no row was left out."""


def curve(steps: pl.DataFrame, *, most_bins: int) -> Curve:
    """The training loss of `step` rows (`Metrics.steps`), in at most `most_bins` bins of equal size."""
    losses = steps["train_loss"].to_numpy()
    size = max(1, -(-len(losses) // most_bins))
    kept = kept_indices(losses, size)
    return Curve(
        steps=steps["step"].to_numpy()[kept],
        tokens=steps["tokens"].to_numpy()[kept],
        seconds=steps["seconds"].to_numpy()[kept],
        losses=losses[kept],
        mean_steps=_bin_means(steps["step"].to_numpy().astype(np.float64), size),
        mean_losses=_bin_means(losses, size),
        bin_size=size,
    )


@dataclass(frozen=True, kw_only=True)
class Band:
    """Mean and standard deviation (n - 1) of several curves, along one axis."""

    x: Floats
    mean: Floats
    std: Floats


def band(curves: Sequence[tuple[Floats, Floats]]) -> Band | None:
    """Mean and standard deviation of curves, each given as x (ascending) and y.

    Linearly interpolated at the x of the first curve that all curves cover. None for fewer than two curves,
    or curves without common x.
    """
    if len(curves) < 2 or not all(len(x) for x, _ in curves):
        return None
    begin = max(x[0] for x, _ in curves)
    end = min(x[-1] for x, _ in curves)
    first, _ = curves[0]
    common = first[(first >= begin) & (first <= end)]
    if not len(common):
        return None
    values = np.stack([np.interp(common, x, y) for x, y in curves])
    return Band(x=common, mean=values.mean(axis=0), std=values.std(axis=0, ddof=1))


def kept_indices(values: Floats, size: int) -> Indices:
    """Indices of each bin's minimum and maximum and of the first and last value, sorted; all for size 1.

    A bin with values that are not finite keeps the first of them, too: a loss that diverged is an extreme.
    """
    count = len(values)
    if size == 1 or count == 0:
        return np.arange(count)
    kept: Sequence[int] = [0, count - 1]
    starts = np.arange(0, count, size)
    finite = np.isfinite(values)
    low = _padded(np.where(finite, values, np.inf), size, fill=np.inf).argmin(axis=1)
    high = _padded(np.where(finite, values, -np.inf), size, fill=-np.inf).argmax(axis=1)
    odd = _padded((~finite).astype(np.float64), size, fill=0.0)
    odd_bins = odd.any(axis=1)
    indices = [kept, starts + low, starts + high, starts[odd_bins] + odd[odd_bins].argmax(axis=1)]
    return np.unique(np.concatenate(indices)).astype(np.int64)


def _padded(values: Floats, size: int, *, fill: float) -> Floats:
    """The values in rows of `size`; the last row is padded with `fill`."""
    missing = -len(values) % size
    return np.concatenate([values, np.full(missing, fill)]).reshape(-1, size)


def _bin_means(values: Floats, size: int) -> Floats:
    starts = np.arange(0, len(values), size)
    if not len(starts):
        return np.empty(0)
    counts = np.diff(np.append(starts, len(values)))
    return np.asarray(np.add.reduceat(values, starts) / counts, dtype=np.float64)


def charts(report: Report) -> dict[str, Chart]:
    """The charts of a report that have data, by name; without those of losses over time (`loss_charts`),
    which the page draws from every run."""
    cells, tunings = report.cells, report.tunings
    arms = arms_of(cells)
    tuned = {key for tuning in tunings for key in tuning.plan.keys}
    drawn = {f"over-{key}": _over(arms, key) for key in _numeric_keys(cells) if key not in tuned}
    drawn["time"] = _time(arms, report.verdicts)
    drawn |= {name: draw(arms) for name, draw in _CHARTS.items()}
    headlines = {cell.value("data.headline") for cell in cells}
    for of_set in dict.fromkeys(name for cell in cells for name in cell.sets):
        if headlines != {of_set}:
            drawn[f"validation-loss-{of_set}"] = _validation(arms, of_set)
    many = len(tunings) > 1
    for number, tuning in enumerate(tunings, 1):
        for key in tuning.plan.keys:
            drawn[f"tuning-{number}-{key}" if many else f"tuning-{key}"] = _tuning(arms, tuning, key)
    return {name: chart for name, chart in drawn.items() if chart.has_data}


def loss_charts(cells: Sequence[CellResult]) -> dict[str, Chart]:
    """Training and validation loss over time, if a run has them: arms with several seeds are a mean in a band
    of one standard deviation."""
    arms = arms_of(cells)
    drawn = {"training-loss": _training(arms), "validation-loss": _validation(arms)}
    return {name: chart for name, chart in drawn.items() if chart.has_data}


def styles(cells: Sequence[CellResult]) -> list[Style]:
    """A style for each cell.

    If there are few enough, the colour stands for schedule and correction, and the dash for optimizer, model
    and further keys, or the other way round; of more cells than styles the dash is of optimizer and model
    alone. Otherwise all styles are used in turn.
    """
    choices = [(_variant, _family), (_family, _variant)]
    if len(cells) > len(HUES) * len(DASHES):
        choices.append((_variant, _trained))
    for colour_of, dash_of in choices:
        colours = list(dict.fromkeys(map(colour_of, cells)))
        dashes = list(dict.fromkeys(map(dash_of, cells)))
        if 1 < len(colours) <= len(HUES) and len(dashes) <= len(DASHES):
            return [_style(colours.index(colour_of(cell)), dashes.index(dash_of(cell))) for cell in cells]
    return [_style(index % len(HUES), index // len(HUES) % len(DASHES)) for index in range(len(cells))]


def _style(hue: int, dash: int) -> Style:
    return Style(colour=HUES[hue], dash=DASHES[dash], marker=MARKERS[dash])


def _trained(cell: CellResult) -> tuple[str, ...]:
    return (cell.optimizer, cell.model)


def _family(cell: CellResult) -> tuple[str, ...]:
    further = (
        f"{key}={value!r}"
        for key, value in cell.axes.items()
        if not key.startswith("correction.") and key not in cell.chosen
    )
    return (*_trained(cell), *further)


def _variant(cell: CellResult) -> tuple[str, ...]:
    corrections = (f"{key}={value!r}" for key, value in cell.axes.items() if key.startswith("correction."))
    return (cell.schedule, f"{cell.error_feedback!r}", *corrections)


def arms_of(cells: Sequence[CellResult]) -> list[Arm]:
    return [
        Arm(place=place, cell=cell, name=printable(cell.name), style=style)
        for place, (cell, style) in enumerate(zip(cells, styles(cells), strict=True))
    ]


def diverged(cell: CellResult) -> bool:
    """Whether a run of the cell diverged, or ended with a higher loss than it began with."""
    ends = [(each[0].val_loss, each[-1].val_loss) for run in cell.runs if (each := run.evaluations)]
    return bool(cell.diverged) or any(last > first for first, last in ends)


def _apart(lines: Sequence[Line]) -> list[Line]:
    """The lines; one on which later ones lie is wider, so that all are seen."""
    drawn = [
        (place, np.array(line.y, dtype=np.float64))
        for place, line in enumerate(lines)
        if line.high is None and line.opacity == 1
    ]
    found = list(lines)
    for number, (place, y) in enumerate(drawn):
        line = lines[place]
        others = [each for later, each in drawn[number + 1 :] if lines[later].arm != line.arm]
        above = sum(_coincide(y, each) for each in others)
        found[place] = replace(line, width=line.width + 2.5 * min(above, 4))
    return found


def _coincide(one: Floats, other: Floats) -> bool:
    """Whether two lines are nowhere farther apart than 0.5% of the first one's range."""
    if len(one) != len(other):
        return False
    near = np.abs(one - other) <= 0.005 * (np.nanmax(one) - np.nanmin(one))
    return bool((near | (np.isnan(one) & np.isnan(other))).all())


def _of_losses(lines: Sequence[Line], arms: Sequence[Arm], **further: Any) -> Chart:
    """A chart of losses. Its y axis is that of the arms that did not diverge; the others leave it."""
    y_range = None
    off = {arm.place for arm in arms if diverged(arm.cell)}
    kept = [value for line in lines if line.arm not in off for value in (*line.y, *(line.high or ()))]
    if known := [value for value in kept if value is not None and off]:
        room = 0.05 * (max(known) - min(known)) or 0.01
        y_range = (min(known) - room, max(known) + room)
        lines = [
            replace(line, diverged_at=_leaves(line, y_range[1]))
            if line.arm in off and line.high is None and line.opacity == 1
            else line
            for line in lines
        ]
    return Chart(kind="lines", lines=_apart(lines), y_range=y_range, **further)


def _leaves(line: Line, top: float) -> float | None:
    """The x at which a line rises above, or is no longer finite; None if it does neither."""
    for place, y in enumerate(line.y):
        if y is not None and y <= top:
            continue
        before = line.y[place - 1] if place else None
        x: float = line.x[max(place - 1, 0)]
        if before is None or y is None:
            return x
        following: float = line.x[place]
        return x + (top - before) / (y - before) * (following - x)
    return None


def _training(arms: Sequence[Arm]) -> Chart:
    lines: list[Line] = []
    for arm in arms:
        runs = [run.steps for run in arm.cell.runs if run.steps is not None and len(run.steps)]
        if len(runs) == 1:
            raw = curve(runs[0], most_bins=_RAW_BINS)
            lines.append(arm.faint(raw.steps.tolist(), _known(raw.losses), width=0.6, opacity=0.25))
        binned = [curve(steps, most_bins=_SMOOTH_BINS) for steps in runs]
        curves = [(line.mean_steps, line.mean_losses) for line in binned]
        lines += _mean_in_a_band(arm, curves, marker=None)
    return _of_losses(
        lines,
        arms,
        title="Training loss",
        about="Mean over bins of steps; behind a single run its steps. Arms that diverged leave the chart "
        "at an arrow.",
        x="steps",
        y="training loss, nats per token",
    )


def _validation(arms: Sequence[Arm], of_set: str | None = None) -> Chart:
    """Validation loss over tokens, of a validation set; None: of the headline."""
    lines: list[Line] = []
    for arm in arms:
        measured = [[*_losses(run.evaluations, of_set)] for run in arm.cell.runs]
        curves = [np.array(losses, dtype=np.float64).T for losses in measured if losses]
        lines += _mean_in_a_band(arm, [(tokens, loss) for tokens, loss in curves], marker=arm.style.marker)
    return _of_losses(
        lines,
        arms,
        title="Validation loss" if of_set is None else f"Validation loss of {of_set}",
        about="At each evaluation. Arms that diverged leave the chart at an arrow.",
        x="tokens",
        y="validation loss, nats per token",
    )


def _losses(evaluations: Sequence[Evaluation], of_set: str | None) -> Iterator[tuple[int, float]]:
    """Tokens and loss of each evaluation that measured the set."""
    for evaluation in evaluations:
        if of_set is None:
            yield evaluation.tokens, evaluation.val_loss
        elif (loss := (evaluation.sets or {}).get(of_set)) is not None:
            yield evaluation.tokens, loss.val_loss


def _mean_in_a_band(arm: Arm, curves: Sequence[tuple[Floats, Floats]], *, marker: str | None) -> list[Line]:
    """The mean of an arm's runs with a band of one standard deviation, or its runs where there is no mean."""
    lines: list[Line] = []
    found = band(curves)
    if found is not None:
        low, high = found.mean - found.std, found.mean + found.std
        lines.append(_band(arm, found.x.tolist(), _known(low), _known(high)))
        curves = [(found.x, found.mean)]
    for number, (x, y) in enumerate(curves):
        lines.append(arm.line(x.tolist(), _known(y), marker=marker, in_legend=number == 0))
    return lines


def _band(
    arm: Arm, x: Sequence[Any], low: Sequence[float | None], high: Sequence[float | None], **further: Any
) -> Line:
    """A band between two curves, as far as both are known."""
    known = [ends for ends in zip(x, low, high, strict=True) if None not in ends]
    places, least, most = zip(*known, strict=True) if known else ((), (), ())
    return arm.faint([*places], [*least], high=[*most], width=0, opacity=0.18, **further)


def _known(values: Floats) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _gaps(arms: Sequence[Arm]) -> Chart:
    rows = []
    for arm in arms:
        pairs = arm.cell.gap_pairs
        if pairs.mean is None or not math.isfinite(pairs.mean) or diverged(arm.cell):
            continue
        interval = pairs.interval
        text = "one seed: no interval" if interval is None else f"{interval.low:.4f} to {interval.high:.4f}"
        rows.append(
            Row(arm=arm, values=[pairs.mean], texts=[text], interval=interval, marks=pairs.differences)
        )
    return Chart(
        title="Gap to the synchronous counterpart",
        about="Validation loss minus that of the synchronous counterpart, in nats per token. Bars are 95% "
        "intervals from the differences between runs with the same seed; small marks are these differences. "
        "Arms that diverged are left out.",
        kind="points",
        x="gap, nats per token",
        rows=rows,
    )


def _time(arms: Sequence[Arm], found: Sequence[Verdict]) -> Chart:
    """The arms of the verdicts, where the delayed one was run in several lengths."""
    arm_of = {id(arm.cell): arm for arm in arms}
    lines: dict[str, list[Line]] = {}
    for verdict in found:
        if len(verdict.lengths) < 2:
            continue
        cells = (verdict.delayed, verdict.synchronous)
        for (name, points), cell in zip(time_by_loss(verdict).items(), cells, strict=False):
            arm = arm_of[id(cell)]
            hours = [time for time, _ in points]
            spreads = [each for _, losses in points if (each := spread(losses)) is not None]
            means = np.array([each.mean for each in spreads])
            deviations = np.array([each.std or 0.0 for each in spreads])
            low, high = _known(means - deviations), _known(means + deviations)
            lines[name] = [_band(arm, hours, low, high, name=name)] if deviations.any() else []
            lines[name].append(arm.line(hours, _known(means), name=name))
    return Chart(
        title="Loss over time",
        about="Validation loss at the end of runs of several lengths, over the time of their tokens at the "
        "arm's mean speed; of a synchronous arm, at that of its fastest schedule. Bands are one standard "
        "deviation over seeds. An arm further to the left at the same loss gets there earlier.",
        kind="lines",
        x="training time, hours",
        y="validation loss, nats per token",
        lines=[line for of_arm in lines.values() for line in of_arm],
    )


def _throughput(arms: Sequence[Arm]) -> Chart:
    rows = [
        Row(
            arm=arm,
            values=[speed.mean],
            texts=[_speedup(arm.cell)],
            interval=_told(arm.cell.speed_interval),
        )
        for arm in arms
        if (speed := arm.cell.tokens_per_second) is not None
    ]
    return Chart(
        title="Throughput",
        about=f"Tokens per second in steady state, with the {CONFIDENCE:.0%} interval over seeds (of one "
        "seed, over its segments), from logarithms; without it where it spans more than a factor of "
        f"{MOST_FACTOR:g}. In the bar: the ratio to the fastest synchronous cell, with its interval.",
        kind="bars",
        x="tokens per second",
        rows=rows,
    )


def _speedup(cell: CellResult) -> str:
    """The ratio to the fastest synchronous cell, with its interval."""
    text = ratio_text(cell.throughput_ratio, cell.throughput_interval)
    return "" if text is None else f"ratio {text}" if text == CANNOT_BE_TOLD else f"× {text}"


def _told(interval: Interval | None) -> Interval | None:
    """The interval, unless it says nothing."""
    return None if interval is None or interval.says_nothing else interval


def _grid(
    arms: Sequence[Arm], values: Callable[[CellResult], Sequence[float]], text: Callable[[float], str]
) -> list[Row]:
    return [
        Row(arm=arm, values=known, texts=[*map(text, known)]) for arm in arms if (known := values(arm.cell))
    ]


def _busy(arms: Sequence[Arm]) -> Chart:
    return Chart(
        title="Busy share of each rank",
        about="Share of the steady state in which a rank did not wait, mean over seeds.",
        kind="grid",
        x="rank",
        rows=_grid(arms, lambda cell: cell.busy_by_rank, "{:.0%}".format),
        lowest=0,
        highest=1,
    )


def _memory(arms: Sequence[Arm]) -> Chart:
    unit, name = memory_unit(arm.cell for arm in arms)
    return Chart(
        title="Peak memory of each rank",
        about="Peak memory, the largest over seeds.",
        kind="grid",
        x="rank",
        rows=_grid(arms, lambda cell: cell.peak_memory, lambda peak: f"{peak / unit:.3g} {name}"),
        lowest=0,
    )


def _load(arms: Sequence[Arm]) -> Chart:
    return Chart(
        title="Load of experts",
        about="Tokens of the busiest expert of an update over the mean of all experts, in each block of "
        "experts in the last segment; mean over seeds. On the page, the chart of losses shows it over time.",
        kind="grid",
        x="block of experts",
        rows=_grid(arms, lambda cell: cell.load_by_block, "{:.2f}".format),
        lowest=1,
    )


def _numeric_keys(cells: Sequence[CellResult]) -> list[str]:
    """Keys of the matrix whose values are numbers, without the length of runs."""
    tried = [each for cell in cells for each in (cell, *cell.tried)]
    keys = dict.fromkeys(key for cell in cells for key in cell.axes if key != "train.steps")
    values = {key: [cell.value(key) for cell in tried] for key in keys}
    return [key for key, of_key in values.items() if all(type(value) in (int, float) for value in of_key)]


def _over(arms: Sequence[Arm], key: str) -> Chart:
    """Loss over a key of the matrix: a line for cells that differ in it alone, or of which one was chosen."""
    lines: list[Line] = []
    left_out = (key, *arms[0].cell.chosen)
    groups = grouped(arms, lambda arm: arm_settings(arm.cell, left_out))
    names = arm_names([group[0].cell for group in groups], without=left_out)
    for name, group in zip(names, groups, strict=True):
        tried = [each for arm in group for each in arm.cell.tried or (arm.cell,)]
        known = sorted((cell.value(key), loss) for cell in tried if (loss := _loss_or_inf(cell)) is not None)
        x, losses = [value for value, _ in known], [loss for _, loss in known]
        best = min(range(len(x)), key=losses.__getitem__, default=0)
        if len({*x}) > 1 and math.isfinite(losses[best]):
            arm = next((arm for arm in group if arm.cell.value(key) == x[best]), group[0])
            y = _known(np.array(losses))
            gone = _first_missing(x, y)
            lines.append(arm.line(x, y, name=printable(name), best=best, diverged_at=gone))
    values = [value for line in lines for value in line.x]
    return Chart(
        title=f"Loss over {printable(key)}",
        about="Validation loss, mean over seeds; a line for cells that differ in this setting alone. The "
        "large mark is the best of a line, an arrow stands where runs diverged.",
        kind="lines",
        x=printable(key),
        y="validation loss, nats per token",
        logarithmic=min(values, default=0) > 0 and max(values) >= 4 * min(values),
        lines=_apart(lines),
    )


def _loss_or_inf(cell: CellResult) -> float | None:
    """The mean validation loss, infinite if a run diverged; None without one."""
    if diverged(cell):
        return math.inf
    return None if cell.val_loss is None else cell.val_loss.mean


def _first_missing(x: Sequence[Any], y: Sequence[float | None]) -> Any:
    return next((place for place, value in zip(x, y, strict=True) if value is None), None)


def _tuning(arms: Sequence[Arm], tuning: Tuning, key: str) -> Chart:
    """Loss over a tuned key: a line for each arm and rung that candidates have reached."""
    lines: list[Line] = []
    arm_of = {run.id: arm for arm in arms for run in arm.cell.runs}
    for standing in tuning.arms:
        shown = [arm_of[run] for run in standing.leading.candidate.runs if run in arm_of]
        if shown:
            lines += _tuned_lines(standing, key, shown[0])
    spaced = tuning.plan.question.over[tuning.plan.keys.index(key)]
    return Chart(
        title=printable(key),
        about="Validation loss over the tuned setting at each rung; the farther a rung, the darker. Large "
        "marks are the best of each arm. Losses at different rungs are after different numbers of steps.",
        kind="lines",
        x=printable(key),
        y="validation loss, nats per token",
        logarithmic=spaced.endswith(":log"),
        lines=lines,
    )


def _tuned_lines(standing: ArmStanding, key: str, arm: Arm) -> list[Line]:
    """The candidates of an arm by increasing value of the key; values that are not all numbers are text, in
    the order of the plan. The best candidate is marked in the last rung."""
    plotted = [(compared.candidate.values[key], compared) for compared in standing.candidates]
    if all(isinstance(value, (int, float)) for value, _ in plotted):
        plotted.sort(key=lambda pair: pair[0])
    else:
        plotted = [(printed(key, value), compared) for value, compared in plotted]
    rungs = {
        step: reached
        for step in standing.arm.rungs
        if (reached := [(value, compared) for value, compared in plotted if step in compared.losses])
    }
    lines = []
    for number, (step, reached) in enumerate(rungs.items()):
        is_last = step == standing.arm.rungs[-1]
        marked = [place for place, (_, compared) in enumerate(reached) if compared is standing.best]
        is_farthest = number == len(rungs) - 1
        x = [value for value, _ in reached]
        y = _known(np.array([compared.losses[step] for _, compared in reached], dtype=np.float64))
        lines.append(
            arm.line(
                x,
                y,
                name=arm.name if is_farthest else f"{arm.name}, step {step}",
                in_legend=is_farthest,
                opacity=1.0 if is_last else 0.25 + 0.5 * number / len(rungs),
                best=marked[0] if is_last and marked else None,
                diverged_at=_first_missing(x, y),
            )
        )
    return lines


_CHARTS: dict[str, Callable[[Sequence[Arm]], Chart]] = {
    "gap": _gaps,
    "throughput": _throughput,
    "busy": _busy,
    "memory": _memory,
    "load": _load,
}
