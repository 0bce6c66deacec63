"""Charts as plain mappings for plotly: the page embeds them, and `plotly.graph_objects.Figure` takes them."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from asyncpp_cli.report.formats.charts import Chart, Line

_ERROR_BARS = "#57606a"


def plotly_figure(chart: Chart) -> dict[str, Any]:
    """`data` and `layout` of a chart.

    The `meta` of a trace is the place of its arm among the cells, or a list with one for each of its points,
    so that the page can leave arms out; `meta` of the layout lists those of the rows.
    """
    if chart.kind == "lines":
        layout: dict[str, Any] = {
            "xaxis": {"title": {"text": _plain(chart.x)}},
            "yaxis": {"title": {"text": chart.y}},
            "annotations": [_arrow(line, chart) for line in chart.lines if line.diverged_at is not None],
        }
        if chart.y_range is not None:
            layout["yaxis"]["range"] = [*chart.y_range]
        if chart.logarithmic:
            layout["xaxis"]["type"] = "log"
        return {"data": [_line(line) for line in chart.lines], "layout": layout}
    names = [_plain(row.arm.name) for row in chart.rows]
    layout = {
        "xaxis": {"title": {"text": chart.x}},
        "yaxis": {
            "tickvals": list(range(len(names))),
            "ticktext": names,
            "range": [len(names) - 0.5, -0.5],
            "zeroline": False,
        },
        "meta": [row.arm.place for row in chart.rows],
    }
    draw = {"points": _points, "bars": _bars, "grid": _grid}[chart.kind]
    return {"data": draw(chart, layout), "layout": layout}


def _arrow(line: Line, chart: Chart) -> dict[str, Any]:
    """An arrow at the upper edge, where a line leaves the chart; its `name` is the place of its arm."""
    return {
        "name": str(line.arm),
        "x": math.log10(line.diverged_at) if chart.logarithmic else line.diverged_at,
        "y": 1,
        "yref": "paper",
        "ax": 0,
        "ay": 26,
        "text": "",
        "hovertext": f"{_plain(line.name)} diverged",
        "arrowcolor": line.colour,
        "arrowwidth": 2,
    }


def _line(line: Line) -> dict[str, Any]:
    name = _plain(line.name)
    trace: dict[str, Any] = {
        "type": "scatter",
        "meta": line.arm,
        "name": name,
        "legendgroup": str(line.arm),
        "showlegend": line.in_legend,
        "opacity": line.opacity,
        "line": {"color": line.colour, "width": line.width, "dash": line.dash},
        "mode": "lines",
        "x": line.x,
        "y": line.y,
    }
    if line.high is not None:
        trace |= {
            "x": [*line.x, *reversed(line.x)],
            "y": [*line.high, *reversed(line.y)],
            "fill": "toself",
            "fillcolor": line.colour,
            "hoverinfo": "skip",
        }
        return trace
    trace |= {"text": name, "hovertemplate": "%{y:.4f} at %{x}<br>%{text}<extra></extra>"}
    if line.marker is not None:
        sizes = [13 if place == line.best else 6 for place in range(len(line.x))]
        trace |= {
            "mode": "lines+markers",
            "marker": {"color": line.colour, "symbol": line.marker, "size": sizes},
        }
    return trace


def _rows(chart: Chart) -> dict[str, Any]:
    """What every trace of one entry per row has."""
    return {
        "meta": [row.arm.place for row in chart.rows],
        "x": [row.values[0] for row in chart.rows],
        "y": list(range(len(chart.rows))),
        "text": [row.texts[0] for row in chart.rows],
        "showlegend": False,
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [row.above or 0 for row in chart.rows],
            "arrayminus": [row.below or 0 for row in chart.rows],
            "color": _ERROR_BARS,
            "thickness": 1.5,
            "width": 5,
        },
    }


def _points(chart: Chart, layout: dict[str, Any]) -> list[dict[str, Any]]:
    layout["xaxis"] |= {"rangemode": "tozero", "zeroline": True, "zerolinewidth": 2, "tickformat": "+.3~f"}
    marks = [(row.arm.place, mark, place) for place, row in enumerate(chart.rows) for mark in row.marks]
    styles = [row.arm.style for row in chart.rows]
    return [
        {
            **_rows(chart),
            "type": "scatter",
            "mode": "markers",
            "hovertemplate": "%{x:+.4f}, %{text}<extra></extra>",
            "marker": {
                "color": [style.colour for style in styles],
                "symbol": [style.marker for style in styles],
                "size": 11,
            },
        },
        {
            "type": "scatter",
            "mode": "markers",
            "meta": [arm for arm, _, _ in marks],
            "x": [mark for _, mark, _ in marks],
            "y": [place for _, _, place in marks],
            "hovertemplate": "%{x:+.4f}<extra>one seed</extra>",
            "showlegend": False,
            "marker": {"color": "#8c959f", "size": 5, "symbol": "line-ns-open"},
        },
    ]


def _bars(chart: Chart, layout: dict[str, Any]) -> list[dict[str, Any]]:
    layout["xaxis"]["rangemode"] = "tozero"
    layout["bargap"] = 0.3
    return [
        {
            **_rows(chart),
            "type": "bar",
            "orientation": "h",
            "textposition": "inside",
            "insidetextanchor": "start",
            "hovertemplate": "%{x:,.0f}<extra></extra>",
            "marker": {"color": [row.arm.style.colour for row in chart.rows]},
        }
    ]


def _grid(chart: Chart, layout: dict[str, Any]) -> list[dict[str, Any]]:
    columns = max(len(row.values) for row in chart.rows)
    layout["xaxis"] |= {"dtick": 1, "showgrid": False, "zeroline": False}
    layout["coloraxis"] = {
        "cmin": chart.lowest,
        "cmax": max(value for row in chart.rows for value in row.values)
        if chart.highest is None
        else chart.highest,
        "colorscale": [[0, "#ffffff"], [1, "#2f8fc4"]],
        "showscale": False,
    }
    trace = {
        "type": "heatmap",
        "meta": [row.arm.place for row in chart.rows],
        "z": [[*row.values, *[None] * (columns - len(row.values))] for row in chart.rows],
        "text": [[*row.texts, *[""] * (columns - len(row.values))] for row in chart.rows],
        "y": list(range(len(chart.rows))),
        "hovertemplate": "%{x}: %{text}<extra></extra>",
        "coloraxis": "coloraxis",
        "xgap": 2,
        "ygap": 2,
    }
    if columns <= 16:
        trace |= {"texttemplate": "%{text}", "textfont": {"color": "#000000"}}
    return [trace]


def _plain(text: str) -> str:
    """The text without markup, some of which plotly takes."""
    return escape(text, quote=False)
