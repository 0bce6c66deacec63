"""A report as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

from asyncpp_cli.code_version import asyncpp_version
from asyncpp_cli.plain_text import printable
from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.document import Report
from asyncpp_cli.report.gantt_svg import to_svg
from asyncpp_cli.report.loaded import Run
from asyncpp_cli.report.names import arm_names, value_text
from asyncpp_cli.report.page_data import page_data
from asyncpp_cli.report.table import DISPENSABLE, Heading, Table, table_of_cells
from asyncpp_cli.report.timelines import Pair, pairs

MOST_TIMELINES = 8

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
"""What the page may load: nothing from anywhere."""


def to_page(report: Report, *, beside: str, folder: Path) -> str:
    """The page.

    Args:
        report: its content.
        beside: name of the Parquet file with the whole curves, in the same folder.
        folder: where the page will stand; links to run folders start there.
    """
    from plotly.offline import get_plotlyjs

    name = _text(report.name)
    own = files("asyncpp_cli.report")
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{name}</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{own.joinpath('page.css').read_text(encoding='utf-8')}</style></head><body>",
        f"<header><h1>{name}</h1><p>{_text(_summary(report.cells))}</p></header><main>",
        _section("answer", "What came out", _list(report.words)),
        _section("table", "Every cell", _tables(report)),
        _section("curves", "Loss", _CURVES + _thinned(beside)),
        _section("gaps", "Gap to the synchronous counterpart", _GAPS),
        _section("speed", "Throughput", _SPEED),
        _section("busy", "Busy share of each rank", _BUSY),
        _section("memory", "Peak memory of each rank", _MEMORY),
        _section("timelines", "Predicted and measured timelines", _timelines(report.cells)),
        _section("arms", "Configurations and runs", _configurations(report.cells, folder)),
        f"</main><footer><p>Written by asyncpp {_text(asyncpp_version())}.</p></footer>",
        f'<script type="application/json" id="data">{page_data(report.cells)}</script>',
        f"<script>{get_plotlyjs()}</script>",
        f"<script>{own.joinpath('page.js').read_text(encoding='utf-8')}</script>",
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


_CURVES = """
<div class="controls" id="controls"></div>
<div class="columns"><div class="chart tall" id="loss-chart"></div><div id="arm-list"></div></div>
"""
_GAPS = """
<p>Validation loss minus that of the synchronous counterpart, nats a token; right of zero the delay costs.
Bars are the 95% intervals of the differences between runs of one seed, small marks these differences.</p>
<div class="chart" id="gap-chart"></div>
"""
_SPEED = """
<p>Tokens a second in steady state, mean and standard deviation over seeds; in the bar, times the synchronous
counterpart's.</p><div class="chart" id="speed-chart"></div>
"""
_BUSY = """
<p>Share of the steady state in which a rank did not wait, mean over seeds.</p>
<div class="chart" id="busy-chart"></div>
"""
_MEMORY = (
    """<p>The most that a rank held, the largest over seeds.</p><div class="chart" id="memory-chart"></div>"""
)


_EVERY_COLUMN = '<label class="every-column"><input type="checkbox" id="every-column"> every column</label>'

_MORE = frozenset({key for key, _ in DISPENSABLE} | {"tokens_per_second", "bubble"})
"""Columns that a phone shows when it is asked to: what is left is what was compared, loss, gap and speed."""


def _text(text: object) -> str:
    return escape(printable(text))


def _section(name: str, title: str, content: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>{content}</section>' if content else ""


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>" if lines else ""


def _summary(cells: Sequence[Cell]) -> str:
    runs = [run.state for cell in cells for run in cell.runs]
    counts = ", ".join(f"{runs.count(state)} {state}" for state in dict.fromkeys(runs))
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{len(cells)} cells, {len(runs)} runs: {counts}. Written {now}."


def _tables(report: Report) -> str:
    wide = _table(table_of_cells(report.cells, width=None, leading=report.rows))
    laid_out = _table(report.table(width=None)) if report.cols else ""
    troubles = f'<div class="troubles">{_list(report.troubles)}</div>' if report.troubles else ""
    conditions = "".join(f'<p class="conditions">{_text(line)}</p>' for line in report.conditions)
    return f"{laid_out}{_EVERY_COLUMN}{wide}{troubles}{conditions}"


def _table(table: Table) -> str:
    head = "".join(
        f"<th{_class(heading)}>{'<br>'.join(_text(line) for line in heading.title.split(chr(10)))}</th>"
        for heading in table.headings
    )
    body = []
    for place, row in enumerate(table.rows):
        state = table.states[place] if table.states else ""
        cells = "".join(
            f"<td{_class(heading)}>{_text(text)}</td>"
            for heading, text in zip(table.headings, row, strict=True)
        )
        body.append(f'<tr class="{escape(state)}">{cells}</tr>')
    remarks = "".join(f"<p>{_text(line)}</p>" for line in table.remarks)
    inner = f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll"><table>{inner}</table></div>{remarks}'


def _class(heading: Heading) -> str:
    names = ["number"] * heading.right + ["more"] * (heading.key in _MORE)
    return f' class="{" ".join(names)}"' if names else ""


def _thinned(beside: str) -> str:
    return (
        '<p class="conditions">Long curves are thinned to their extremes in equal spans of steps; smoothing '
        "averages all steps. Every step of every run: "
        f'<a href="{quote(os.fsencode(beside))}">{_text(beside)}</a>.</p>'
    )


def _timelines(cells: Sequence[Cell]) -> str:
    drawn = pairs(cells)
    if not drawn:
        return ""
    said = (
        "<p>A row a rank, a box a micro-batch: pale a forward, full a backward; the colour is the weight "
        "version that it reads, an outlined bar an update. Measured: the clocks of one run's ranks, action "
        "by action; between the boxes a rank waited or did something else. Predicted: the same actions with "
        "stages of equal cost, a backward twice a forward, updates and messages that take no time.</p>"
    )
    figures = "".join(
        f"<figure><figcaption>{_text(_caption(pair))}</figcaption>"
        f'<div class="scroll">{to_svg(pair)}</div></figure>'
        for pair in drawn[:MOST_TIMELINES]
    )
    more = len(drawn) - MOST_TIMELINES
    rest = f"<p>{more} more programs are not drawn (asyncpp schedule draw).</p>" if more > 0 else ""
    return f"{said}{figures}{rest}"


def _caption(pair: Pair) -> str:
    trouble = f"{pair.trouble}." if pair.trouble is not None else ""
    return " ".join(part for part in (f"{pair.title}.", f"{pair.shown}.", _bubbles(pair), trouble) if part)


def _bubbles(pair: Pair) -> str:
    known = (
        ("predicted", pair.predicted_bubble),
        ("from the mean times of actions", pair.measured_times_bubble),
        ("measured by clocks", pair.clocked_bubble),
    )
    said = ", ".join(f"{name} {share:.0%}" for name, share in known if share is not None)
    return f"Bubble: {said}." if said else ""


def _configurations(cells: Sequence[Cell], folder: Path) -> str:
    """What all arms have in common, and of each what is its own, with its runs."""
    configs = [next((run.config for run in cell.runs if run.config is not None), None) for cell in cells]
    known = [config for config in configs if config is not None]
    keys = [key for key in (known[0] if known else ()) if key != "seed" and not key.startswith("site.")]
    own = [key for key in keys if len({repr(config.get(key)) for config in known}) > 1]
    shared = {key: known[0][key] for key in keys if key not in own}
    common = f"What all arms have in common ({len(shared)} keys)"
    parts = [f"<details><summary>{common}</summary>{_keys(shared)}</details>"]
    for cell, name, config in zip(cells, arm_names(cells), configs, strict=True):
        mine = _keys({key: config.get(key) for key in own}) if config is not None else ""
        runs = "".join(_run(run, folder) for run in cell.runs)
        parts.append(f"<details><summary>{_text(name)}</summary>{mine}<ul>{runs}</ul></details>")
    return "".join(parts)


def _keys(values: dict[str, object]) -> str:
    rows = "".join(
        f"<tr><td>{_text(key)}</td><td>{_text('null' if value is None else value_text(value))}</td></tr>"
        for key, value in values.items()
    )
    return f'<div class="scroll"><table class="keys"><tbody>{rows}</tbody></table></div>'


def _run(run: Run, folder: Path) -> str:
    label = _text(run.id)
    if run.folder is not None:
        # Relative, so that page and experiment can be moved or copied together.
        path = quote(os.fsencode(os.path.relpath(run.folder.absolute(), folder).replace(os.sep, "/")))
        label = f'<a href="{escape(path)}/">{label}</a>'
    loss = run.measurement.val_loss
    parts = [run.state, *([f"validation loss {loss:.4f}"] if loss is not None else [])]
    if run.reason is not None:
        parts.append(run.reason)
    return f"<li>{label}: {_text(', '.join(parts))}</li>"
