"""Charts as files for papers, drawn by matplotlib."""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncpp_cli.base.errors import DamagedError, UserError
from asyncpp_cli.base.outputs import write_output
from asyncpp_cli.report.formats.charts import Chart, Line, charts, loss_charts
from asyncpp_cli.report.tables.document import Report
from stages.config.records import read_bytes

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

_DASHES: dict[str, Any] = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (9, 3))}
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "x": "X"}
_GREY = "#57606a"


def write_figures(report: Report, *, folder: Path, width: float) -> list[Path]:
    """Write each chart that has data as SVG, PDF and PNG; returns the files.

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
        raise UserError("--figures needs matplotlib: pip install '.[plot]' in asyncpp's clone") from error
    drawn = loss_charts(report.cells) | charts(report)
    _refuse_foreign(folder, drawn)
    # A fixed salt, so that the same figure gives the same SVG.
    with mpl.rc_context({"svg.hashsalt": "asyncpp", "svg.fonttype": "path", "font.size": 8}):
        return [
            _saved(figure, folder / f"{name}.{suffix}")
            for name, figure in [(name, _figure(chart, width)) for name, chart in drawn.items()]
            for suffix in SUFFIXES
        ]


def _refuse_foreign(folder: Path, names: Iterable[str]) -> None:
    """Refuse to replace files that are not such figures: the command line does not name them.

    Raises:
        UserError: there is such a file.
    """
    for name, suffix in itertools.product(names, SUFFIXES):
        file = folder / f"{name}.{suffix}"
        try:
            foreign = _MARK not in read_bytes(file)
        except FileNotFoundError:
            continue
        except DamagedError as error:
            raise UserError(f"--figures {folder}: {error}") from error
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
    write_output(file, stream.getvalue())
    return file


def _figure(chart: Chart, width: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Half of the width for names.
    names = [textwrap.fill(row.arm.name, int(_CHARACTERS_PER_INCH * width)) for row in chart.rows]
    tallest = max((name.count("\n") + 1 for name in names), default=1)
    height = 3.2 if chart.kind == "lines" else 0.8 + max(0.24, 0.14 * tallest) * len(names)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eaeef2", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(textwrap.fill(_plain(chart.x), int(1.2 * _CHARACTERS_PER_INCH * width)))
    if chart.kind == "lines":
        axes.set_ylabel(chart.y)
        for line in chart.lines:
            _draw_line(axes, line)
        if chart.logarithmic:
            axes.set_xscale("log")
        if chart.y_range is not None:
            axes.set_ylim(*chart.y_range)
        _add_legend(figure, axes)
    else:
        {"points": _draw_points, "bars": _draw_bars, "grid": _draw_grid}[chart.kind](axes, chart)
        axes.set_yticks(range(len(chart.rows)), [*map(_plain, names)])
        axes.set_ylim(len(chart.rows) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
    return figure


def _draw_line(axes: Axes, line: Line) -> None:
    y = np.array(line.y, dtype=np.float64)
    if line.high is not None:
        high = np.array(line.high, dtype=np.float64)
        axes.fill_between(line.x, y, high, color=line.colour, alpha=line.opacity, linewidth=0)
        return
    marker = "" if line.marker is None else _MARKERS[line.marker]
    look: dict[str, Any] = {"marker": marker, "color": line.colour, "alpha": line.opacity}
    label = _plain(line.name) if line.in_legend else None
    style = {"linestyle": _DASHES[line.dash], "linewidth": 0.75 * line.width, "markersize": 2.5}
    axes.plot(line.x, y, label=label, **look, **style)
    if line.diverged_at is not None:
        # At the upper edge: x of the data, y of the axes.
        edge: dict[str, Any] = {
            "marker": "^",
            "markersize": 6,
            "clip_on": False,
            "transform": axes.get_xaxis_transform(),
        }
        axes.plot([line.diverged_at], [1], color=line.colour, linestyle="", **edge)
    if line.best is not None:
        axes.plot([line.x[line.best]], [y[line.best]], markersize=8, **look)


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Add a legend below the axes: finding a free place inside compares all points of all curves."""
    names = axes.get_legend_handles_labels()[1]
    room = _CHARACTERS_PER_INCH * figure.get_figwidth()
    columns = 2 if max(map(len, names), default=0) < room else 1
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * -(-len(names) // columns))
    figure.legend(loc="outside lower center", fontsize=7, frameon=False, ncols=columns)


def _draw_points(axes: Axes, chart: Chart) -> None:
    axes.axvline(0, color=_GREY, linewidth=1)
    for place, row in enumerate(chart.rows):
        axes.plot(
            row.marks, [place] * len(row.marks), linestyle="", marker="|", markersize=4, color="#8c959f"
        )
        axes.errorbar(
            row.values,
            [place],
            xerr=None if row.above is None or row.below is None else [[row.below], [row.above]],
            color=row.arm.style.colour,
            ecolor=_GREY,
            elinewidth=1,
            capsize=2.5,
            marker=_MARKERS[row.arm.style.marker],
            markersize=5,
        )


def _draw_bars(axes: Axes, chart: Chart) -> None:
    for place, row in enumerate(chart.rows):
        axes.barh(place, row.values[0], xerr=row.above, color=row.arm.style.colour, ecolor=_GREY, height=0.7)
        axes.annotate(
            row.texts[0],
            (0, place),
            (3, 0),
            textcoords="offset points",
            color="white",
            va="center",
            fontsize=7,
        )


def _draw_grid(axes: Axes, chart: Chart) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    columns = max(len(row.values) for row in chart.rows)
    values = np.full((len(chart.rows), columns), np.nan)
    for place, row in enumerate(chart.rows):
        values[place, : len(row.values)] = row.values
        for column, text in enumerate(row.texts if columns <= 16 else ()):
            axes.text(column, place, text, ha="center", va="center", fontsize=6)
    scale = LinearSegmentedColormap.from_list("busy", ["#ffffff", "#2f8fc4"])
    axes.imshow(values, cmap=scale, vmin=chart.lowest, vmax=chart.highest, aspect="auto")
    axes.set_xticks(range(columns))
    axes.grid(visible=False)


def _plain(text: str) -> str:
    """The text without formulas: matplotlib reads a dollar sign as the start of one."""
    return text.replace("$", r"\$")
