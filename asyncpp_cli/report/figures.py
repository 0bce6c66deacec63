"""Static figures for papers, drawn with matplotlib: the same numbers and styles as on the page."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncpp_cli.errors import UserError
from asyncpp_cli.files import write_bytes
from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.columns import printable
from asyncpp_cli.report.curves import curve
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

_WIDTH = 5.5
"""Inches: a column of text."""
_LEGEND_ROW = 0.14
_LONG_NAME = 45
"""Characters beyond which two names do not stand side by side."""
_BINS = 400
_SMOOTH_BINS = 60
"""Means that the line of a training loss goes through."""

_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (9, 3))}
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "x": "X"}

Arm = tuple[Cell, str, Style]


def write_figures(report: Report, *, folder: Path) -> list[Path]:
    """Write each figure that there are numbers for, as SVG, PDF and PNG; returns the files.

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
        drawn = {name: draw(arms) for name, draw in _FIGURES.items()}
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
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, stream.getvalue())
    except OSError as error:
        raise UserError(f"--figures {file.parent}: cannot be written ({error.strerror})") from error
    return file


def _axes(height: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
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
    columns = 2 if max(map(len, names), default=0) < _LONG_NAME else 1
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * -(-len(names) // columns))
    figure.legend(loc="outside lower center", fontsize=7, frameon=False, ncols=columns)


def _training(arms: Sequence[Arm]) -> Figure | None:
    figure, axes = _axes(3.2)
    empty = True
    for cell, name, style in arms:
        label: str | None = name
        for run in cell.runs:
            if run.steps is None or not len(run.steps):
                continue
            thinned = curve(run.steps, most_bins=_BINS)
            axes.plot(thinned.steps, thinned.losses, color=style.colour, linewidth=0.4, alpha=0.25)
            means = curve(run.steps, most_bins=_SMOOTH_BINS)
            axes.plot(means.mean_steps, means.mean_losses, linewidth=1.2, label=label, **_line(style))
            label, empty = None, False
    if empty:
        return None
    axes.set_xlabel("steps")
    axes.set_ylabel("training loss, nats a token")
    _legend(figure, axes)
    return figure


def _validation(arms: Sequence[Arm]) -> Figure | None:
    figure, axes = _axes(3.2)
    empty = True
    for cell, name, style in arms:
        label: str | None = name
        for run in cell.runs:
            if evaluations := run.measurement.evaluations:
                axes.plot(
                    [one.tokens for one in evaluations],
                    [one.val_loss for one in evaluations],
                    marker=_MARKERS[style.marker],
                    markersize=2.5,
                    linewidth=1.0,
                    label=label,
                    **_line(style),
                )
                label, empty = None, False
    if empty:
        return None
    axes.set_xlabel("tokens")
    axes.set_ylabel("validation loss, nats a token")
    _legend(figure, axes)
    return figure


def _gaps(arms: Sequence[Arm]) -> Figure | None:
    shown = [arm for arm in arms if arm[0].gap is not None]
    if not shown:
        return None
    figure, axes = _axes(0.8 + 0.24 * len(shown))
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


def _throughput(arms: Sequence[Arm]) -> Figure | None:
    shown = [arm for arm in arms if arm[0].tokens_per_second is not None]
    if not shown:
        return None
    figure, axes = _axes(0.8 + 0.24 * len(shown))
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
