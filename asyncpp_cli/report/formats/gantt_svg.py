"""Timelines as SVG, with a tooltip for each action."""

from __future__ import annotations

from html import escape

from asyncpp_cli.report.analysis.timelines import TimelinePair
from schedules.actions import Action, Op
from schedules.simulate import Timeline

# As in `schedules.io.picture`: colour encodes the weight version, with a contrast between consecutive ones.
_HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_WIDTH = 960
_ROW = 22
_LABEL = 52
_AXIS = 20
_NARROWEST_LABEL = 6.5
"""Width of a digit."""


def to_svg(pair: TimelinePair) -> str:
    """The timelines of a pair, one below the other, on one time scale."""
    timelines = [("predicted", pair.predicted)]
    if pair.measured is not None:
        timelines.append(("measured", pair.measured))
    length = max(timeline.makespan for _, timeline in timelines) or 1.0
    parts: list[str] = []
    top = 0.0
    for title, timeline in timelines:
        parts.append(f'<text class="g-title" x="0" y="{top + 13:g}">{escape(title)}</text>')
        top += _AXIS
        for rank in range(timeline.program.num_ranks):
            parts += _row(timeline, rank, top=top, scale=(_WIDTH - _LABEL) / length, unit=pair.unit)
            top += _ROW
        top += 6
    end = f"{length:.3g} {pair.unit}"
    parts.append(f'<text class="g-axis" x="{_LABEL}" y="{top + 8:g}">0</text>')
    parts.append(f'<text class="g-axis" x="{_WIDTH}" y="{top + 8:g}" text-anchor="end">{escape(end)}</text>')
    height = top + 14
    label = escape(f"Timelines of {pair.title}", quote=True)
    return (
        f'<svg class="gantt" viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def _row(timeline: Timeline, rank: int, *, top: float, scale: float, unit: str) -> list[str]:
    actions = timeline.program.actions[rank]
    starts, ends = timeline.starts[rank], timeline.ends[rank]
    width = _WIDTH - _LABEL
    parts = [
        f'<text class="g-rank" x="0" y="{top + _ROW - 7:g}">rank {rank}</text>',
        f'<rect class="g-idle" x="{_LABEL}" y="{top + 1:g}" width="{width}" height="{_ROW - 3}"/>',
    ]
    marks = []
    for action, start, end in zip(actions, starts, ends, strict=True):
        x, size = _LABEL + start * scale, (end - start) * scale
        tooltip = escape(f"{action}: {start:.4g} to {end:.4g} {unit}")
        hue = _HUES[action.version % len(_HUES)]
        if action.op is Op.UPDATE:
            # On top of the boxes, and wide enough to be seen.
            size = max(size, 2.0)
            marks.append(
                f'<rect x="{x:.1f}" y="{top:g}" width="{size:.1f}" height="{_ROW - 1}" fill="{hue}" '
                f'stroke="#000" stroke-width=".7"><title>{tooltip}</title></rect>'
            )
            continue
        parts.append(
            f'<rect x="{x:.1f}" y="{top + 1:g}" width="{max(size - 0.6, 0.2):.1f}" height="{_ROW - 3}" '
            f'fill="{hue}" fill-opacity="{_opacity(action)}"><title>{tooltip}</title></rect>'
        )
        label = str(action.microbatch)
        if size > _NARROWEST_LABEL * len(label) + 2:
            dark = action.op is not Op.FORWARD and hue == _HUES[0]
            parts.append(
                f'<text class="g-box{" g-light" if dark else ""}" x="{x + size / 2:.1f}" '
                f'y="{top + _ROW - 7:g}">{label}</text>'
            )
    return [*parts, *marks]


def _opacity(action: Action) -> float:
    """Forwards are pale, backwards opaque, weight halves of split backwards and of the head in between."""
    return {Op.FORWARD: 0.4, Op.BACKWARD_WEIGHT: 0.7, Op.HEAD_WEIGHT: 0.7}.get(action.op, 1.0)
