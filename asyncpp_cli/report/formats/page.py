"""A report as a self-contained HTML page with the data of its charts: it needs no network, no other file."""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from asyncpp_cli.base.atomic_files import write_text
from asyncpp_cli.base.console import as_plain, printable
from asyncpp_cli.base.tables import Heading, Table
from asyncpp_cli.base.version import asyncpp_version
from asyncpp_cli.experiment.template import SHORTHANDS
from asyncpp_cli.report.analysis.answer import mean_loss
from asyncpp_cli.report.analysis.cells import CellResult, value_text
from asyncpp_cli.report.formats.charts import (
    DASHES,
    HUES,
    MARKERS,
    Chart,
    Floats,
    Indices,
    charts,
    curve,
    diverged,
    kept_indices,
    styles,
)
from asyncpp_cli.report.formats.options import ReportOptions
from asyncpp_cli.report.formats.plotly_charts import plotly_figure
from asyncpp_cli.report.formats.timelines import TimelinePair, timeline_pairs, to_svg
from asyncpp_cli.report.load.measure import peak_memory
from asyncpp_cli.report.load.run import RunResult
from asyncpp_cli.report.tables.document import Report
from stages.rows import Segment

MOST_TIMELINES = 8


def _policy(*, own_file: bool) -> str:
    """The page loads nothing, or from where it lies alone."""
    scripts = "'unsafe-inline' 'self'" if own_file else "'unsafe-inline'"
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def plotly_file() -> str:
    """Name of the file in the folder of assets; pages of another version refer to another one."""
    from plotly.offline import get_plotlyjs_version

    return f"plotly-{get_plotlyjs_version()}.min.js"


def write_assets(folder: Path) -> None:
    """Write the charts' script, which several pages share."""
    from plotly.offline import get_plotlyjs

    folder.mkdir(parents=True, exist_ok=True)
    if not (script := folder / plotly_file()).exists():
        write_text(script, get_plotlyjs())


def _relative(file: Path, folder: Path) -> str:
    """A link that holds when page and file are moved together."""
    return quote(os.fsencode(os.path.relpath(file.absolute(), folder).replace(os.sep, "/")))


def to_page(report: Report, options: ReportOptions) -> str:
    """The page. Links to run folders are relative to its own.

    With `--assets` it refers to `plotly_file` there; without, it contains the script, compressed.
    """
    from plotly.offline import get_plotlyjs

    folder, assets = options.file.absolute().parent, options.assets
    if assets is None:
        packed = base64.b64encode(zlib.compress(get_plotlyjs().encode())).decode()
        plotly = f'<script type="text/plain" id="plotly">{packed}</script>'
    else:
        plotly = f'<script src="{escape(_relative(assets / plotly_file(), folder))}"></script>'
    drawn = charts(report)
    tuned = {name: chart for name, chart in drawn.items() if name.startswith("tuning-")}
    beside = {name: chart for name, chart in drawn.items() if name not in tuned}
    name = escaped(report.name)
    resources = files(__package__)
    reload = options.watch_seconds if options.watch else None
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{name}</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(own_file=assets is not None)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{resources.joinpath('page.css').read_text(encoding='utf-8')}</style></head><body>",
        '<a class="skip" href="#table">Skip to the table</a>',
        f"<header><h1>{name}</h1><p>{escaped(_summary(report.cells))}{_reloads(reload)}</p>",
        *(f'<p class="answer">{escaped(line)}</p>' for line in report.first_line),
        '</header><main tabindex="-1">',
        _section("answer", "Summary", _list(report.summary)),
        _section("table", "Cells", _tables(report)),
        _section("tuning", "Tuning", _tunings(report, tuned)),
        _section("curves", "Loss", _CURVES),
        *(_section(name, escaped(chart.title), _chart(name, chart)) for name, chart in beside.items()),
        _section("timelines", "Predicted and measured timelines", _timelines(report.cells)),
        _section("arms", "Configurations and runs", _configurations(report.cells, folder)),
        f"</main><footer><p>Written by asyncpp {escaped(asyncpp_version())}.</p></footer>",
        f'<script type="application/json" id="data">{page_data(report.cells, drawn, reload=reload)}</script>',
        plotly,
        f"<script>{resources.joinpath('page.js').read_text(encoding='utf-8')}</script>",
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


_CURVES = """
<div class="controls" id="controls"></div>
<div class="columns">
<div class="chart tall" id="loss-chart" role="group" aria-label="Loss over time"></div>
<div id="arm-list"></div>
</div>
<p class="conditions">Long curves show the extremes of equal bins of steps; smoothing averages all steps.</p>
"""
_EVERY_COLUMN = '<label class="every-column"><input type="checkbox" id="every-column"> all columns</label>'


def _section(name: str, title: str, content: str) -> str:
    return f'<section id="{name}"><h2>{title}</h2>{content}</section>' if content else ""


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_with_code(line)}</li>' for line in lines)}</ul>" if lines else ""


def _with_code(line: str) -> str:
    """A sentence whose commands, between backquotes, are code; the page adds a button that copies each."""
    parts = line.split("`")
    return "".join(
        f"<code>{escaped(part)}</code>" if place % 2 and place < len(parts) - 1 else escaped(part)
        for place, part in enumerate(parts)
    )


def _summary(cells: Sequence[CellResult]) -> str:
    runs = [run.state for cell in cells for run in cell.runs]
    counts = ", ".join(f"{runs.count(state)} {state}" for state in dict.fromkeys(runs))
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{len(cells)} cells, {len(runs)} runs: {counts}. Written {now}."


def _reloads(seconds: float | None) -> str:
    return "" if seconds is None else f" It reloads itself every {seconds:g} s until all runs have ended."


def _tables(report: Report) -> str:
    cells = html_table(report.table_of_cells, caption="Cells, averaged over seeds")
    pivot = html_table(report.table(width=None), caption="Values by row and column") if report.cols else ""
    problems = _problems(report)
    conditions = "".join(f'<p class="conditions">{escaped(line)}</p>' for line in report.conditions)
    return f"{pivot}{_EVERY_COLUMN}{cells}{problems}{conditions}"


def _problems(report: Report) -> str:
    """Groups of runs that ended early, their ids folded, and further remarks."""
    found = [
        f"<details><summary>{escaped(each.about)}</summary>{_list(each.ids)}</details>"
        for each in report.failures
    ]
    return f'<div class="problems">{"".join(found)}{_list(report.notes)}</div>' if report.problems else ""


def _chart(name: str, chart: Chart) -> str:
    # The height of one with rows follows from their number (page.js).
    tall = " tall" * (chart.kind == "lines")
    about = f'<p id="{escaped(name)}-about">{escaped(chart.about)}</p>'
    labels = (
        f'role="group" aria-label="{escape(printable(chart.title))}" aria-describedby="{escaped(name)}-about"'
    )
    return f'{about}<div class="chart{tall}" id="{escaped(name)}-chart" {labels}></div>'


def _tunings(report: Report, tuned: Mapping[str, Chart]) -> str:
    """A table of the arms of every tuning, and a chart for each tuned key."""
    parts = []
    for tuning in report.tunings:
        columns, rows = tuning.table
        table = Table(headings=[Heading(title=column) for column in columns], rows=rows)
        parts.append(html_table(table, caption="Arms of the tuning"))
    return "".join([*parts, *(_chart(name, chart) for name, chart in tuned.items())])


def _timelines(cells: Sequence[CellResult]) -> str:
    pairs = timeline_pairs(cells)
    if not pairs:
        return ""
    legend = (
        "<p>Each row is a rank, each box a micro-batch: pale boxes are forwards, opaque ones backwards, "
        "outlined bars updates. Colours are weight versions. Measured: by the clocks of one run's ranks; "
        "between boxes a rank waited or did something else. Predicted: the same actions if stages cost the "
        "same, a backward takes twice as long as a forward, and updates and messages take no time.</p>"
    )
    figures = "".join(
        f"<figure><figcaption>{escaped(_caption(pair))}</figcaption>"
        f'<div class="scroll" tabindex="0">{to_svg(pair)}</div></figure>'
        for pair in pairs[:MOST_TIMELINES]
    )
    more = len(pairs) - MOST_TIMELINES
    rest = f"<p>{more} more programs are not drawn (asyncpp schedule draw).</p>" if more > 0 else ""
    return f"{legend}{figures}{rest}"


def _caption(pair: TimelinePair) -> str:
    problem = f"{pair.problem}." if pair.problem is not None else ""
    return " ".join(part for part in (f"{pair.title}.", f"{pair.steps}.", _bubbles(pair), problem) if part)


def _bubbles(pair: TimelinePair) -> str:
    bubbles = (
        ("predicted", pair.predicted_bubble),
        ("from the mean times of actions", pair.mean_times_bubble),
        ("measured", pair.measured_bubble),
    )
    text = ", ".join(f"{name} {share:.0%}" for name, share in bubbles if share is not None)
    return f"{pair.waits.capitalize()}: {text}." if text else ""


def _configurations(cells: Sequence[CellResult], folder: Path) -> str:
    """The settings that all arms share, and for each arm its other settings and its runs."""
    configs = [cell.config for cell in cells]
    known = [config for config in configs if config is not None]
    keys = [key for key in (known[0] if known else ()) if key != "seed" and not key.startswith("site.")]
    varying = [key for key in keys if len({repr(config.get(key)) for config in known}) > 1]
    shared = {key: known[0][key] for key in keys if key not in varying}
    parts = [f"<details><summary>Settings of all arms ({len(shared)})</summary>{_keys(shared)}</details>"]
    for cell, config in zip(cells, configs, strict=True):
        settings = _keys({key: config.get(key) for key in varying}) if config is not None else ""
        runs = "".join(_run(run, folder) for run in cell.runs)
        parts.append(f"<details><summary>{escaped(cell.name)}</summary>{settings}<ul>{runs}</ul></details>")
    return "".join(parts)


def _keys(values: dict[str, object]) -> str:
    rows = "".join(
        f"<tr><td>{escaped(key)}</td><td>{escaped('null' if value is None else value_text(value))}</td></tr>"
        for key, value in values.items()
    )
    return f'<div class="scroll" tabindex="0"><table class="keys"><tbody>{rows}</tbody></table></div>'


def _run(run: RunResult, folder: Path) -> str:
    label = escaped(run.id)
    if run.folder is not None:
        label = f'<a href="{escape(_relative(run.folder, folder))}/">{label}</a>'
    loss = run.val_loss
    parts = [run.state, *([f"validation loss {loss:.4f}"] if loss is not None else [])]
    if run.reason is not None:
        parts.append(run.reason)
    return f"<li>{label}: {escaped(', '.join(parts))}</li>"


def html_table(table: Table, *, caption: str = "Cells") -> str:
    """The table as an HTML element, its remarks below it; the caption is for readers who do not see it."""
    head = "".join(f'<th scope="col"{_class(heading)}>{_title(heading)}</th>' for heading in table.headings)
    body = []
    for index, row in enumerate(table.rows):
        state = table.states[index] if table.states else ""
        cells = "".join(
            f"<td{_class(heading)}>{escaped(text)}</td>"
            for heading, text in zip(table.headings, row, strict=True)
        )
        body.append(f'<tr class="{escape(state)}">{cells}</tr>')
    remarks = "".join(f"<p>{escaped(line)}</p>" for line in table.remarks)
    inner = f"<caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    region = f'class="scroll" tabindex="0" role="region" aria-label="{caption}"'
    return f"<div {region}><table>{inner}</table></div>{remarks}"


def _title(heading: Heading) -> str:
    # A phone may break the name of a key after its dots.
    return "<br>".join(escaped(line).replace(".", ".<wbr>") for line in heading.title.split("\n"))


def _class(heading: Heading) -> str:
    names = (
        ["number"] * heading.right
        + ["more"] * (heading.secondary or heading.gives_way)
        + ["extra"] * heading.extra
    )
    return f' class="{" ".join(names)}"' if names else ""


def escaped(text: object) -> str:
    """The text without control characters, for the content of an element."""
    return escape(printable(text))


MOST_CHARACTERS = 2_300_000
"""Limit of the data: with plotly's two megabytes, compressed, and the tables, the page stays under five."""

MOST_AT_FIRST = 12
"""Arms that charts show at most until others are chosen."""

_MOST_BINS = 1000
_CHARACTERS_OF_A_BIN = 70
_FEWEST_BINS = 8


def page_data(
    cells: Sequence[CellResult],
    charts: Mapping[str, Chart],
    *,
    reload: float | None = None,
    most_characters: int = MOST_CHARACTERS,
) -> str:
    """The data as JSON, safe inside a `script` element.

    Args:
        cells: of the report.
        charts: other than the curves, by name.
        reload: seconds after which the page loads itself again; None: never.
        most_characters: to which curves are thinned.
    """
    figures = {name: as_plain(plotly_figure(chart)) for name, chart in charts.items()}
    runs = sum(len(cell.runs) for cell in cells)
    bins = min(_MOST_BINS, max(_FEWEST_BINS, most_characters // (_CHARACTERS_OF_A_BIN * max(runs, 1))))
    text = _encoded(cells, figures, bins, reload)
    while len(text) > most_characters and bins > _FEWEST_BINS:
        # Nearly in proportion: evaluations and short runs are not thinned further.
        bins = max(_FEWEST_BINS, min(bins - 1, int(bins * 0.85 * most_characters / len(text))))
        text = _encoded(cells, figures, bins, reload)
    return text


def ranks(cells: Sequence[CellResult]) -> tuple[list[int], int]:
    """The place of each cell in charts, and how many of them are shown until others are chosen.

    Of many cells the best of each arm come first, by loss, and they alone are shown. Synchronous schedules
    are one arm here: they compute the same losses. Few cells keep the table's order.
    """
    if len(cells) <= MOST_AT_FIRST:
        return list(range(len(cells))), len(cells)

    best: dict[tuple[Any, ...], int] = {}
    ordered = sorted(range(len(cells)), key=lambda place: mean_loss(cells[place]))
    for place in ordered:
        cell = cells[place]
        schedule = "" if cell.synchronous else cell.schedule
        arm = (schedule, cell.optimizer, cell.error_feedback, cell.correction, cell.model)
        best.setdefault(arm, place)
    first = list(best.values())
    ordered = first + [place for place in ordered if place not in first]
    return [ordered.index(place) for place in range(len(cells))], min(MOST_AT_FIRST, len(first))


def _without_loss(cell: CellResult) -> str:
    """What stands in the place of a loss that is none."""
    if cell.speed_only and cell.loss_of is not None:
        return f"as {cell.loss_of.schedule}"
    return "diverged" if cell.diverged else cell.state


def _encoded(cells: Sequence[CellResult], figures: Mapping[str, Any], bins: int, reload: float | None) -> str:
    places, at_first = ranks(cells)
    keys = dict.fromkeys((*SHORTHANDS, *(key for cell in cells for key in cell.axes)))
    varying = [key for key in keys if len({repr(cell.value(key)) for cell in cells}) > 1]
    arms = [
        {
            "name": cell.name,
            "key": sha256(cell.runs[0].id.encode()).hexdigest()[:6],
            "rank": rank,
            "colour": style.colour,
            "dash": style.dash,
            "marker": style.marker,
            "val_loss": as_plain(cell.val_loss and cell.val_loss.mean),
            "without_loss": _without_loss(cell),
            "axes": {key: value_text(cell.value(key)) for key in varying},
            "diverged": diverged(cell),
            "runs": [_run_data(run, bins) for run in cell.runs],
        }
        for cell, style, rank in zip(cells, styles(cells), places, strict=True)
    ]
    content = {
        "arms": arms,
        "atFirst": at_first,
        "charts": figures,
        "reload": reload,
        "hues": HUES,
        "dashes": DASHES,
        "markers": MARKERS,
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    # Nothing that ends the script element or begins a comment in it.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _run_data(run: RunResult, bins: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": run.id, "seed": run.value("seed"), "timed": not run.replayed}
    rows = run.steps if run.steps is not None and len(run.steps) else None
    if rows is not None:
        thinned = curve(rows, most_bins=bins)
        steps, tokens = thinned.steps.tolist(), thinned.tokens.tolist()
        fields["train"] = _series(steps, thinned.losses, _per_step(steps, tokens), thinned.seconds)
        if thinned.bin_size > 1:
            means = _series(_rounded(thinned.mean_steps), thinned.mean_losses)
            fields["mean"] = means | {"size": thinned.bin_size}
    if evaluations := run.evaluations:
        kept = [evaluations[index] for index in _kept([one.val_loss for one in evaluations], bins)]
        steps = [one.step for one in kept]
        tokens = _per_step(steps, [one.tokens for one in kept])
        fields["val"] = _series(steps, [one.val_loss for one in kept], tokens, [one.seconds for one in kept])
    for name, value_of in _OF_SEGMENTS.items():
        found = [(row, value) for row in run.segments if (value := value_of(row)) is not None]
        if found and run.start is not None:
            of_kept = [found[index] for index in _kept([value for _, value in found], bins)]
            kept_rows, values = zip(*of_kept, strict=True)
            ends, seconds = [row.last_step for row in kept_rows], [row.seconds for row in kept_rows]
            fields[name] = _series(ends, values, run.start.tokens_per_step, seconds)
    for name in ("lr", "grad_norm"):
        if rows is not None and np.isfinite(numbers := rows[name].to_numpy()).any():
            places = _kept(numbers, max(_FEWEST_BINS, bins // 8))
            fields[name] = _series(rows["step"].to_numpy()[places].tolist(), numbers[places])
    return fields


def _series(
    steps: Sequence[float | None],
    values: Sequence[float] | Floats,
    tokens: int | Sequence[int] | None = None,
    seconds: Sequence[float] | Floats | None = None,
) -> dict[str, Any]:
    """Numbers along the steps, and where they are known along the tokens (or by the tokens of a step) and the
    seconds."""
    further = {} if seconds is None else {"tokens": tokens, "seconds": _rounded(seconds)}
    return {"step": steps, **further, "loss": _rounded(values)}


_OF_SEGMENTS: Mapping[str, Callable[[Segment], float | None]] = {
    "load": lambda row: max(row.experts.max_over_mean) if row.experts else None,
    "memory": lambda row: max(peak_memory(row), default=0) / 2**30 or None,
    "speed": lambda row: row.tokens_per_second,
}
"""What the page draws of segments: of experts the largest load over the mean in the most uneven block, the
memory of the fullest rank in GiB, tokens per second."""


def _kept(values: Sequence[float] | Floats, bins: int) -> Indices:
    """Places of the values to draw in so many bins."""
    return kept_indices(np.array(values), max(1, -(-len(values) // bins)))


def _per_step(steps: Sequence[int], tokens: Sequence[int]) -> int | list[int]:
    """Tokens per step if it is constant, else the tokens at each step."""
    each = tokens[-1] // steps[-1] if steps[-1] else 0
    return each if all(step * each == count for step, count in zip(steps, tokens, strict=True)) else [*tokens]


def _rounded(values: Sequence[float] | Floats) -> list[float | None]:
    """The values with six digits, more than any useful zoom shows; None for one that is not finite."""
    given = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(given)
    known = finite & (given != 0)
    scale = 10.0 ** (5 - np.floor(np.log10(np.abs(given, where=known, out=np.ones_like(given)))))
    rounded: list[float | None] = (np.round(given * scale) / scale).tolist()
    if finite.all():
        return rounded
    return [value if fine else None for value, fine in zip(rounded, finite, strict=True)]
