"""Static figures for papers, with the numbers and styles of the page."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncpp_cli.atomic_files import write_bytes
from asyncpp_cli.errors import UserError
from asyncpp_cli.plain_text import printable
from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.analysis.names import arm_names
from asyncpp_cli.report.analysis.tuned_arms import figure_names, is_logarithmic, tuned_arms
from asyncpp_cli.report.load.curves import Floats, band, curve
from asyncpp_cli.report.load.diagnostics import by_step, sharpness_curve
from asyncpp_cli.report.tables.document import Report
from asyncpp_cli.report.tables.styles import Style, styles
from asyncpp_cli.tune.result import Tuning

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = ("svg", "pdf", "png")

_CREATOR = "asyncpp report, with Matplotlib"
_MARK = _CREATOR.encode()
"""Marks figures of asyncpp, so that no other file of the same name is replaced."""

_LEGEND_ROW = 0.14
_CHARACTERS_PER_INCH = 8
"""Longest name in a legend of two columns, for each inch of the figure's width."""
_BINS = 400
_SMOOTH_BINS = 60
"""Bins whose means make the line of a training loss."""

_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (9, 3))}
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "x": "X"}

Arm = tuple[CellResult, str, Style]


def write_figures(report: Report, *, folder: Path, width: float) -> list[Path]:
    """Write each figure that has data as SVG, PDF and PNG; returns the files.

    Args:
        report: to draw.
        folder: for the files.
        width: of a figure, in inches.

    Raises:
        UserError: matplotlib is not installed, or a file of the same name is not such a figure.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UserError("--figures needs matplotlib: pip install 'asyncpp[plot]'") from error
    tunings = figure_names(report.tunings)
    _refuse_foreign(folder, [*_FIGURES, *tunings])
    cells = report.cells
    # Matplotlib reads a dollar sign as the start of a formula.
    names = [printable(name).replace("$", r"\$") for name in arm_names(cells)]
    arms = list(zip(cells, names, styles(cells), strict=True))
    # A fixed salt, so that the same figure gives the same SVG.
    with mpl.rc_context({"svg.hashsalt": "asyncpp", "svg.fonttype": "path", "font.size": 8}):
        drawn = {name: draw(arms, width) for name, draw in _FIGURES.items()}
        drawn |= {name: _tuning(arms, tuning, key, width) for name, (tuning, key) in tunings.items()}
        return [
            _saved(figure, folder / f"{name}.{suffix}")
            for name, figure in drawn.items()
            if figure is not None
            for suffix in SUFFIXES
        ]


def _refuse_foreign(folder: Path, names: Sequence[str]) -> None:
    """Refuse to replace files that are not such figures: the command line does not name them.

    Raises:
        UserError: there is such a file.
    """
    for name, suffix in itertools.product(names, SUFFIXES):
        file = folder / f"{name}.{suffix}"
        try:
            foreign = _MARK not in file.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"--figures {folder}: {file.name} cannot be read ({error.strerror})") from error
        if foreign:
            raise UserError(
                f"--figures {folder}: {file.name} exists and was not written by asyncpp report; move it"
            )


def _saved(figure: Figure, file: Path) -> Path:
    stream = io.BytesIO()
    # Without the date, so that the same numbers give the same file.
    metadata: dict[str, Any] = {
        "svg": {"Date": None, "Creator": _CREATOR},
        "pdf": {"CreationDate": None, "Creator": _CREATOR},
        "png": {"Software": _CREATOR},
    }
    figure.savefig(stream, format=file.suffix[1:], dpi=200, metadata=metadata[file.suffix[1:]])
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, stream.getvalue())
    return file


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eaeef2", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _line(style: Style) -> dict[str, Any]:
    return {"color": style.colour, "linestyle": _DASHES[style.dash]}


def _legend(figure: Figure, axes: Axes) -> None:
    """Add a legend below the axes: finding a free place inside compares all points of all curves."""
    names = axes.get_legend_handles_labels()[1]
    room = _CHARACTERS_PER_INCH * figure.get_figwidth()
    columns = 2 if max(map(len, names), default=0) < room else 1
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * -(-len(names) // columns))
    figure.legend(loc="outside lower center", fontsize=7, frameon=False, ncols=columns)


def _training(arms: Sequence[Arm], width: float) -> Figure | None:
    """Binned training loss: mean and standard deviation over seeds, or a single run with its steps behind."""
    figure, axes = _axes(width, 3.2)
    for cell, name, style in arms:
        runs = [run.steps for run in cell.runs if run.steps is not None and len(run.steps)]
        if len(runs) == 1:
            thinned = curve(runs[0], most_bins=_BINS)
            axes.plot(thinned.steps, thinned.losses, color=style.colour, linewidth=0.4, alpha=0.2)
        binned = [curve(steps, most_bins=_SMOOTH_BINS) for steps in runs]
        lines = [(line.mean_steps, line.mean_losses) for line in binned]
        _draw_runs(axes, lines, name, style, linewidth=1.2, marker="")
    return _finished(figure, axes, x="steps", y="training loss, nats per token")


def _validation(arms: Sequence[Arm], width: float) -> Figure | None:
    figure, axes = _axes(width, 3.2)
    for cell, name, style in arms:
        lines = [
            (
                np.array([evaluation.tokens for evaluation in evaluations], dtype=np.float64),
                np.array([evaluation.val_loss for evaluation in evaluations], dtype=np.float64),
            )
            for run in cell.runs
            if (evaluations := run.measurement.evaluations)
        ]
        _draw_runs(axes, lines, name, style, linewidth=1.0, marker=_MARKERS[style.marker])
    return _finished(figure, axes, x="tokens", y="validation loss, nats per token")


def _sharpness(arms: Sequence[Arm], width: float) -> Figure | None:
    """Learning rate times sharpness: the median of an arm in a band of all its runs, and the limit dotted."""
    figure, axes = _axes(width, 3.2)
    for cell, name, style in arms:
        curves = [sharpness_curve(run.measurement.diagnostics) for run in cell.runs]
        known = [drawn for drawn in curves if drawn is not None]
        values = by_step((drawn.steps, drawn.values) for drawn in known)
        limits = by_step((drawn.steps, drawn.limits) for drawn in known)
        if not values:
            continue
        label = f"{name}, along the update" if known[0].along_update else name
        look: dict[str, Any] = {"marker": _MARKERS[style.marker], "markersize": 2.5, "linewidth": 1.0}
        axes.plot(list(values), [median(of) for of in values.values()], label=label, **look, **_line(style))
        low, high = ([of(there) for there in values.values()] for of in (min, max))
        axes.fill_between(list(values), low, high, color=style.colour, alpha=0.15, linewidth=0)
        middles = [median(of) for of in limits.values()]
        axes.plot(list(limits), middles, color=style.colour, linestyle=":", linewidth=0.8)
    axes.set_yscale("log", nonpositive="mask")
    return _finished(figure, axes, x="steps", y="learning rate times sharpness (dotted: limit)")


def _tuning(arms: Sequence[Arm], tuning: Tuning, key: str, width: float) -> Figure | None:
    """Loss over a tuned key: a line for each arm and rung, the last rung strongest, with the best marked."""
    figure, axes = _axes(width, 3.2)
    for tuned in tuned_arms(tuning, [cell for cell, _, _ in arms]):
        _, name, style = arms[tuned.place]
        curves = tuned.curves(key)
        for number, rung in enumerate(curves):
            look: dict[str, Any] = {"marker": _MARKERS[style.marker], "markersize": 3, **_line(style)}
            strength = 1.0 if rung.is_last else 0.25 + 0.5 * number / len(curves)
            label = name if number == len(curves) - 1 else None
            axes.plot(rung.values, rung.losses, label=label, alpha=strength, linewidth=1.0, **look)
            if rung.best is not None:
                at = [rung.values[rung.best]], [rung.losses[rung.best]]
                axes.plot(*at, marker=_MARKERS[style.marker], markersize=8, color=style.colour)
    if is_logarithmic(tuning, key):
        axes.set_xscale("log")
    return _finished(figure, axes, x=printable(key), y="validation loss, nats per token")


def _draw_runs(
    axes: Axes,
    lines: Sequence[tuple[Floats, Floats]],
    name: str,
    style: Style,
    *,
    linewidth: float,
    marker: str,
) -> None:
    """Draw an arm: the mean of its runs with a band of one standard deviation, or its single run."""
    spread = band(lines)
    if spread is not None:
        low, high = spread.mean - spread.std, spread.mean + spread.std
        axes.fill_between(spread.x, low, high, color=style.colour, alpha=0.18, linewidth=0)
        lines = [(spread.x, spread.mean)]
    label: str | None = name
    for x, y in lines:
        look = {"marker": marker, "markersize": 2.5, "linewidth": linewidth, **_line(style)}
        axes.plot(x, y, label=label, **look)
        label = None


def _finished(figure: Figure, axes: Axes, *, x: str, y: str) -> Figure | None:
    if not axes.lines:
        return None
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    _legend(figure, axes)
    return figure


def _gaps(arms: Sequence[Arm], width: float) -> Figure | None:
    shown = [arm for arm in arms if arm[0].gap is not None]
    if not shown:
        return None
    figure, axes = _axes(width, 0.8 + 0.24 * len(shown))
    axes.axvline(0, color="#57606a", linewidth=1)
    for place, (cell, _, style) in enumerate(shown):
        interval = cell.gap_interval
        axes.errorbar(
            [cell.gap or 0.0],
            [place],
            xerr=None if interval is None else [interval.half_width],
            color=style.colour,
            ecolor="#57606a",
            elinewidth=1,
            capsize=2.5,
            marker=_MARKERS[style.marker],
            markersize=5,
        )
    _label_rows(axes, shown)
    axes.set_xlabel("gap to the synchronous counterpart,\nnats per token (95% interval)")
    return figure


def _throughput(arms: Sequence[Arm], width: float) -> Figure | None:
    shown = [arm for arm in arms if arm[0].tokens_per_second is not None]
    if not shown:
        return None
    figure, axes = _axes(width, 0.8 + 0.24 * len(shown))
    for place, (cell, _, style) in enumerate(shown):
        speed = cell.tokens_per_second
        assert speed is not None
        axes.barh(place, speed.mean, xerr=speed.std, color=style.colour, ecolor="#57606a", height=0.7)
    _label_rows(axes, shown)
    axes.set_xlabel("tokens per second\n(standard deviation over seeds)")
    return figure


def _label_rows(axes: Axes, arms: Sequence[Arm]) -> None:
    axes.set_yticks(range(len(arms)), [name for _, name, _ in arms])
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


_FIGURES = {
    "training-loss": _training,
    "validation-loss": _validation,
    "gap": _gaps,
    "throughput": _throughput,
    "sharpness": _sharpness,
}
"""The function that draws each figure, by the name of its files; it returns None without data."""
