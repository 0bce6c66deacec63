"""The report's figures for notebooks, drawn by plotly with the numbers and styles of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import plotly.graph_objects as go

from asyncpp_cli.plain_text import printable
from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.analysis.names import arm_names
from asyncpp_cli.report.analysis.tuned_arms import figure_names, is_logarithmic, tuned_arms
from asyncpp_cli.report.load.curves import Floats, band, curve
from asyncpp_cli.report.load.diagnostics import sharpness_curve
from asyncpp_cli.report.tables.document import Report
from asyncpp_cli.report.tables.styles import Style, styles
from asyncpp_cli.tune.result import Tuning

_BINS = 400
"""Points of a training curve, each the mean over a bin of steps."""

Arm = tuple[CellResult, str, Style]


def figures_of(report: Report) -> dict[str, go.Figure]:
    """Each figure that has data, by name."""
    names = [printable(name) for name in arm_names(report.cells)]
    arms = list(zip(report.cells, names, styles(report.cells), strict=True))
    drawn = {name: draw(arms) for name, draw in _FIGURES.items()}
    drawn |= {
        name: _tuning(arms, tuning, key) for name, (tuning, key) in figure_names(report.tunings).items()
    }
    return {name: figure for name, figure in drawn.items() if figure.data}


def _training(arms: Sequence[Arm]) -> go.Figure:
    figure = _figure(x="steps", y="training loss, nats per token")
    for cell, name, style in arms:
        binned = [
            curve(run.steps, most_bins=_BINS) for run in cell.runs if run.steps is not None and len(run.steps)
        ]
        _draw_curves(figure, [(line.mean_steps, line.mean_losses) for line in binned], name, style)
    return figure


def _validation(arms: Sequence[Arm]) -> go.Figure:
    figure = _figure(x="tokens", y="validation loss, nats per token")
    for cell, name, style in arms:
        lines = [
            (
                np.array([float(evaluation.tokens) for evaluation in evaluations]),
                np.array([evaluation.val_loss for evaluation in evaluations]),
            )
            for run in cell.runs
            if (evaluations := run.measurement.evaluations)
        ]
        _draw_curves(figure, lines, name, style)
    return figure


def _draw_curves(figure: go.Figure, lines: Sequence[tuple[Floats, Floats]], name: str, style: Style) -> None:
    """Draw an arm: the mean of its runs with a band of one standard deviation, or its single run."""
    spread = band(lines)
    if spread is not None:
        figure.add_scatter(
            x=np.concatenate([spread.x, spread.x[::-1]]),
            y=np.concatenate([spread.mean + spread.std, (spread.mean - spread.std)[::-1]]),
            fill="toself",
            fillcolor=style.colour,
            opacity=0.18,
            line={"width": 0},
            hoverinfo="skip",
            legendgroup=name,
            showlegend=False,
        )
        lines = [(spread.x, spread.mean)]
    for number, (x, y) in enumerate(lines):
        figure.add_scatter(
            x=x,
            y=y,
            mode="lines",
            name=name,
            legendgroup=name,
            showlegend=number == 0,
            line={"color": style.colour, "dash": style.dash},
        )


def _sharpness(arms: Sequence[Arm]) -> go.Figure:
    """Learning rate times sharpness of each run, and its limit as a dotted line."""
    figure = _figure(x="steps", y="learning rate times sharpness (dotted: limit)")
    for cell, name, style in arms:
        curves = [sharpness_curve(run.measurement.diagnostics) for run in cell.runs]
        for number, drawn in enumerate(known for known in curves if known is not None):
            same = {"x": drawn.steps, "mode": "lines", "legendgroup": name}
            label = f"{name}, along the update" if drawn.along_update else name
            line = {"color": style.colour, "dash": style.dash}
            figure.add_scatter(y=drawn.values, name=label, showlegend=number == 0, line=line, **same)
            dotted = {"color": style.colour, "dash": "dot", "width": 1}
            figure.add_scatter(y=drawn.limits, showlegend=False, line=dotted, hoverinfo="skip", **same)
    figure.update_yaxes(type="log")
    return figure


def _tuning(arms: Sequence[Arm], tuning: Tuning, key: str) -> go.Figure:
    """Loss over a tuned key: a line for each arm and rung, the last rung strongest, with the best marked."""
    figure = _figure(x=printable(key), y="validation loss, nats per token")
    for tuned in tuned_arms(tuning, [cell for cell, _, _ in arms]):
        _, name, style = arms[tuned.place]
        curves = tuned.curves(key)
        for number, rung in enumerate(curves):
            figure.add_scatter(
                x=rung.values,
                y=rung.losses,
                mode="lines+markers",
                name=name,
                legendgroup=name,
                showlegend=number == len(curves) - 1,
                hovertext=f"step {rung.step}",
                opacity=1 if rung.is_last else 0.25 + 0.5 * number / len(curves),
                line={"color": style.colour, "dash": style.dash},
                marker={
                    "symbol": style.marker,
                    "size": [13 if place == rung.best else 6 for place in range(len(rung.values))],
                },
            )
    if is_logarithmic(tuning, key):
        figure.update_xaxes(type="log")
    return figure


def _gaps(arms: Sequence[Arm]) -> go.Figure:
    figure = _figure(x="gap to the synchronous counterpart, nats per token (95% interval)", y="")
    for cell, name, style in arms:
        if cell.gap is None:
            continue
        interval = cell.gap_interval
        figure.add_scatter(
            x=[cell.gap],
            y=[name],
            error_x=None if interval is None else {"type": "data", "array": [interval.half_width]},
            mode="markers",
            marker={"color": style.colour, "symbol": style.marker, "size": 9},
            showlegend=False,
        )
    figure.update_yaxes(autorange="reversed")
    return figure


def _throughput(arms: Sequence[Arm]) -> go.Figure:
    figure = _figure(x="tokens per second (standard deviation over seeds)", y="")
    for cell, name, style in arms:
        speed = cell.tokens_per_second
        if speed is None:
            continue
        figure.add_bar(
            x=[speed.mean],
            y=[name],
            orientation="h",
            error_x={"type": "data", "array": [speed.std]},
            marker={"color": style.colour},
            showlegend=False,
        )
    figure.update_yaxes(autorange="reversed")
    return figure


def _figure(*, x: str, y: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(template="plotly_white", xaxis_title=x, yaxis_title=y, margin={"t": 20})
    return figure


_FIGURES: dict[str, Callable[[Sequence[Arm]], go.Figure]] = {
    "training-loss": _training,
    "validation-loss": _validation,
    "gap": _gaps,
    "throughput": _throughput,
    "sharpness": _sharpness,
}
"""The function that draws each figure; it returns a figure without traces where there is no data."""
