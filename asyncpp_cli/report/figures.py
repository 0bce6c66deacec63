"""Static figures for papers, drawn with matplotlib: the same numbers and styles as on the page."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncpp_cli.errors import UserError
from asyncpp_cli.files import write_bytes
from asyncpp_cli.plain_text import printable
from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.curves import Floats, band, curve
from asyncpp_cli.report.document import Report
from asyncpp_cli.report.names import arm_names
from asyncpp_cli.report.styles import Style, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = ("svg", "pdf", "png")

_CREATOR = "asyncpp report, with Matplotlib"
_MARK = _CREATOR.encode()
"""In each file: by it a figure of ours is told from another file of its name."""

_LEGEND_ROW = 0.14
_CHARACTERS_AN_INCH = 8
"""Of a name in the legend, beside its line: longer ones do not stand side by side."""
_BINS = 400
_SMOOTH_BINS = 60
"""Means that the line of a training loss goes through."""

_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (9, 3))}
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "x": "X"}

Arm = tuple[Cell, str, Style]


def write_figures(report: Report, *, folder: Path, width: float) -> list[Path]:
    """Write each figure that there are numbers for, as SVG, PDF and PNG; returns the files.

    Args:
        report: what is drawn.
        folder: where the files go.
        width: of a figure, inches.

    Raises:
        UserError: matplotlib is not there, or the folder cannot be written.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UserError("--figures needs matplotlib: pip install 'asyncpp[plot]'") from error
    _refuse_foreign(folder)
    cells = report.cells
    # A dollar sign would begin a formula.
    names = [printable(name).replace("$", r"\$") for name in arm_names(cells)]
    arms = list(zip(cells, names, styles(cells), strict=True))
    # Fixed names inside an SVG, so that drawing the same figure again writes the same file.
    with mpl.rc_context({"svg.hashsalt": "asyncpp", "svg.fonttype": "path", "font.size": 8}):
        drawn = {name: draw(arms, width) for name, draw in _FIGURES.items()}
        return [
            _saved(figure, folder / f"{name}.{suffix}")
            for name, figure in drawn.items()
            if figure is not None
            for suffix in SUFFIXES
        ]


def _refuse_foreign(folder: Path) -> None:
    """Refuse to replace files in the folder that are no figures of ours: the command line names none of them.

    Raises:
        UserError: there is one of the name of a figure.
    """
    for name, suffix in itertools.product(_FIGURES, SUFFIXES):
        file = folder / f"{name}.{suffix}"
        try:
            foreign = _MARK not in file.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"--figures {folder}: {file.name} cannot be read ({error.strerror})") from error
        if foreign:
            raise UserError(
                f"--figures {folder}: {file.name} is in the way, and not a figure of ours; move it"
            )


def _saved(figure: Figure, file: Path) -> Path:
    stream = io.BytesIO()
    # Without the date: the same numbers make the same file.
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
    """Below the axes: a place inside of them is searched for among all points of all curves."""
    names = axes.get_legend_handles_labels()[1]
    room = _CHARACTERS_AN_INCH * figure.get_figwidth()
    columns = 2 if max(map(len, names), default=0) < room else 1
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * -(-len(names) // columns))
    figure.legend(loc="outside lower center", fontsize=7, frameon=False, ncols=columns)


def _training(arms: Sequence[Arm], width: float) -> Figure | None:
    """Means of spans of steps: over seeds with a band of their standard deviation, or of the one run with its
    single steps behind it."""
    figure, axes = _axes(width, 3.2)
    for cell, name, style in arms:
        runs = [run.steps for run in cell.runs if run.steps is not None and len(run.steps)]
        for steps in runs if len(runs) == 1 else []:
            thinned = curve(steps, most_bins=_BINS)
            axes.plot(thinned.steps, thinned.losses, color=style.colour, linewidth=0.4, alpha=0.2)
        means = [curve(steps, most_bins=_SMOOTH_BINS) for steps in runs]
        _draw_runs(
            axes, [(one.mean_steps, one.mean_losses) for one in means], name, style, linewidth=1.2, marker=""
        )
    return _finished(figure, axes, x="steps", y="training loss, nats a token")


def _validation(arms: Sequence[Arm], width: float) -> Figure | None:
    figure, axes = _axes(width, 3.2)
    for cell, name, style in arms:
        courses = [
            (
                np.array([one.tokens for one in evaluations], dtype=np.float64),
                np.array([one.val_loss for one in evaluations], dtype=np.float64),
            )
            for run in cell.runs
            if (evaluations := run.measurement.evaluations)
        ]
        _draw_runs(axes, courses, name, style, linewidth=1.0, marker=_MARKERS[style.marker])
    return _finished(figure, axes, x="tokens", y="validation loss, nats a token")


def _draw_runs(
    axes: Axes,
    courses: Sequence[tuple[Floats, Floats]],
    name: str,
    style: Style,
    *,
    linewidth: float,
    marker: str,
) -> None:
    """An arm's runs: their mean and a band of one standard deviation, or the one run that there is."""
    spread = band(courses)
    if spread is not None:
        low, high = spread.mean - spread.std, spread.mean + spread.std
        axes.fill_between(spread.at, low, high, color=style.colour, alpha=0.18, linewidth=0)
        courses = [(spread.at, spread.mean)]
    label: str | None = name
    for places, values in courses:
        drawn = {"marker": marker, "markersize": 2.5, "linewidth": linewidth, **_line(style)}
        axes.plot(places, values, label=label, **drawn)
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
    axes.set_xlabel("gap to the synchronous counterpart,\nnats a token (95% interval)")
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
    axes.set_xlabel("tokens a second\n(standard deviation over seeds)")
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
}
"""Each figure by the name of its files, with what draws it, if there are numbers for it."""
