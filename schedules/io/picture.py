"""Timelines drawn with matplotlib, which is imported here and only when a picture is asked for.

One row per rank, one box per action. Forwards are light, backwards full; the colour is the weight version
that the action reads, so staleness shows. An update is a bar in the colour of the version that it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedules.actions import Action, Op, ScheduleError
from schedules.simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".svg", ".png", ".pdf")

# Hues that stay apart for readers who see few colours (Okabe and Ito, 2008), in an order that keeps
# neighbouring versions far from each other.
_HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_IDLE = "#F4F4F4"
_PALE = 0.55
_DARK = 0.45
_WEIGHT_HALVES = (Op.BACKWARD_WEIGHT, Op.HEAD_WEIGHT)
_WIDTH = 11.0
_DIGIT_WIDTH = 0.055
"""Inches, as is the width."""
_MOST_LABELS = 1500
"""Boxes of a panel above which their micro-batches are not written into them."""


def draw(
    timelines: Sequence[Timeline], *, titles: Sequence[str], file: Path, until: float | None = None
) -> None:
    """Draw timelines below each other, on one scale of time, into `file`.

    Args:
        timelines: What to show.
        titles: The line above each of them.
        file: An SVG, PNG or PDF, by its suffix.
        until: Where to cut off; None: at the end of the longest.

    Raises:
        ScheduleError: The suffix is another one, or no time is to be shown.
    """
    if file.suffix not in SUFFIXES:
        raise ScheduleError(f"{file.name}: a picture is a file of {', '.join(SUFFIXES)}")
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    length = max(timeline.makespan for timeline in timelines)
    length = length if until is None else min(until, length)
    if length <= 0:
        raise ScheduleError(f"a picture of time 0 to {length:g} is empty; accepted: times and an end above 0")
    rows = [timeline.program.num_ranks for timeline in timelines]
    # Fixed names inside an SVG, so that drawing the same picture again writes the same file.
    with mpl.rc_context({"svg.hashsalt": "asyncpp", "svg.fonttype": "path"}):
        figure = Figure(figsize=(_WIDTH, sum(0.32 * row + 0.75 for row in rows) + 0.6), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=[row + 1.2 for row in rows])
        for axes, timeline, title in zip(panels[:, 0], timelines, titles, strict=True):
            _draw_panel(axes, timeline, title=title, length=length)
        panels[-1, 0].set_xlabel("time", fontsize=8, loc="right", labelpad=1)
        versions = sorted({version for timeline in timelines for version in _versions(timeline, length)})
        figure.legend(
            handles=[Patch(color=_hue(version), label=str(version)) for version in versions[: len(_HUES)]],
            title="colour: weight version read; pale: forward, full: backward; bar: update"
            + "; dark: shard of the head" * any(timeline.program.head_shards > 0 for timeline in timelines),
            loc="outside lower left",
            ncols=len(_HUES),
            fontsize=7,
            title_fontsize=7,
            frameon=False,
        )
        figure.savefig(file, dpi=150, metadata=_without_date(file))


def _without_date(file: Path) -> dict[str, Any]:
    return (
        {} if file.suffix == ".png" else {"Date": None} if file.suffix == ".svg" else {"CreationDate": None}
    )


def _versions(timeline: Timeline, length: float) -> set[int]:
    """The versions whose colours the panel shows."""
    return {
        action.version
        for actions, starts in zip(timeline.program.actions, timeline.starts, strict=True)
        for action, start in zip(actions, starts, strict=True)
        if start < length
    }


def _draw_panel(axes: Axes, timeline: Timeline, *, title: str, length: float) -> None:
    ranks = timeline.program.num_ranks
    labelled = sum(len(actions) for actions in timeline.program.actions) <= _MOST_LABELS
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(0, length)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for rank, actions in enumerate(timeline.program.actions):
        axes.broken_barh([(0, length)], (rank - 0.4, 0.8), facecolors=_IDLE, linewidth=0)
        starts, ends = timeline.starts[rank], timeline.ends[rank]
        shown = [
            (action, start, end)
            for action, start, end in zip(actions, starts, ends, strict=True)
            if start < length and action.op is not Op.UPDATE
        ]
        axes.broken_barh(
            [(start, end - start) for _, start, end in shown],
            (rank - 0.4, 0.8),
            facecolors=[_colour(action) for action, _, _ in shown],
            edgecolors="white",
            linewidth=0.6,
        )
        if labelled:
            for action, start, end in shown:
                if (end - start) / length * _WIDTH > _DIGIT_WIDTH * len(str(action.microbatch)):
                    _write_label(axes, action, x=(start + end) / 2, row=rank, length=length)
        _draw_updates(axes, timeline, rank=rank, length=length)


def _draw_updates(axes: Axes, timeline: Timeline, *, rank: int, length: float) -> None:
    for action, start, end in zip(
        timeline.program.actions[rank], timeline.starts[rank], timeline.ends[rank], strict=True
    ):
        if action.op is Op.UPDATE and start < length:
            width = max(end - start, 0.0025 * length)
            axes.broken_barh(
                [(end - width, width)],
                (rank - 0.48, 0.96),
                facecolors=_hue(action.version),
                edgecolors="black",
                linewidth=0.7,
                zorder=3,
            )


def _write_label(axes: Axes, action: Action, *, x: float, row: int, length: float) -> None:
    if x < length:
        # Black reads well on the pale boxes and on all hues but the first.
        dark = action.op is not Op.FORWARD and _hue(action.version) == _HUES[0]
        axes.text(
            x,
            row,
            str(action.microbatch),
            ha="center",
            va="center",
            fontsize=6.5,
            color="white" if dark else "black",
            clip_on=True,
        )


def _hue(version: int) -> str:
    return _HUES[version % len(_HUES)]


def _colour(action: Action) -> tuple[float, float, float]:
    hue = _hue(action.version)
    channels = [int(hue[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    pale = _PALE if action.op is Op.FORWARD else _PALE / 2 if action.op in _WEIGHT_HALVES else 0.0
    dark = _DARK if action.op is Op.HEAD or action.op is Op.HEAD_WEIGHT else 0.0
    red, green, blue = ((channel + (1 - channel) * pale) * (1 - dark) for channel in channels)
    return red, green, blue
