"""`asyncpp status`: how the runs of an experiment stand."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncpp_cli.errors import UserError
from asyncpp_cli.states import State
from asyncpp_cli.tables import Narrow, printed

if TYPE_CHECKING:
    from asyncpp_cli.cluster.queue import Queue, Standing
    from asyncpp_cli.runs import Experiment

_SECONDS_BETWEEN_LOOKS = 2.0
_INTERRUPTED_CODE = 130
_NARROW = Narrow(
    optional=["nodes", "saved", "attempt", "tokens/s", "last sign", "train loss", "job"], beneath="reason"
)


def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the experiment.")],
    as_json: Annotated[bool, typer.Option("--json", help="A list of runs, on standard output.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every two seconds.")] = False,
    cells: Annotated[
        bool, typer.Option("--cells", help="A line for each cell of the matrix, its seeds together.")
    ] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Only the runs that failed.")] = False,
) -> None:
    """Show how each run stands: state, step, newest checkpoint, training loss, throughput, last sign, and why
    it ended; on a cluster also the attempt, the job, its nodes, and why it waits.

    A run whose processes have all vanished is marked failed. Where the terminal is too narrow, columns are
    left out and reasons stand below their runs; --json has all.
    """
    from asyncpp_cli.cluster.bad_nodes import remarks
    from asyncpp_cli.cluster.queue import Queue
    from asyncpp_cli.console import say, show_table
    from asyncpp_cli.runs import open_experiment

    experiment = open_experiment(folder)
    if cells and (as_json or failed):
        raise UserError("--cells counts runs; for single ones leave it out")
    if watch and as_json:
        raise UserError("--watch shows a table; for scripts, ask `--json` again and again")
    if watch:
        _watch(experiment, cells=cells, failed=failed)
        return
    queue = Queue(experiment)
    found = queue.standings(with_accounting=True)
    if as_json:
        shown = [standing for standing in found if not failed or _failed(standing)]
        print(json.dumps(_as_json(experiment, shown), indent=1))
        return
    title, columns, rows = _table(experiment, found, cells=cells, failed=failed)
    show_table(columns, rows, title=title, narrow=_NARROW)
    for remark in remarks(experiment):
        say(remark)
    if queue.no_answer:
        say(_no_answer(queue))


def _no_answer(queue: Queue) -> str:
    return f"Which runs are queued is unknown: {queue.no_answer}"


def _as_json(experiment: Experiment, found: list[Standing]) -> list[dict[str, Any]]:
    axes = {cell.id: cell.axes for cell in experiment.cells}
    return [
        {"id": standing.run.id, "axes": axes[standing.run.id]}
        | asdict(standing.status)
        | {
            "saved_step": standing.run.saved_step,
            "site": standing.site,
            "job_id": standing.job_id,
            "job_state": standing.job_state,
            "pending_reason": standing.pending_reason,
            "queue_known": standing.queue_known,
            "nodes": standing.nodes,
            "error_lines": standing.error_lines,
        }
        for standing in found
    ]


def _watch(experiment: Experiment, *, cells: bool, failed: bool) -> None:
    from rich.live import Live

    from asyncpp_cli.console import console, show_table, table_of

    if not console().is_terminal:
        try:
            while True:
                title, columns, rows = _looked_at(experiment, cells=cells, failed=failed)
                show_table(columns, rows, title=title)
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED_CODE) from None
    shown_on = console()
    with Live(console=shown_on, auto_refresh=False, vertical_overflow="visible") as live:
        try:
            while True:
                title, columns, rows = _looked_at(experiment, cells=cells, failed=failed)
                table = table_of(columns, rows, title=title, width=shown_on.width, narrow=_NARROW)
                live.update(table, refresh=True)
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED_CODE) from None


def _looked_at(
    experiment: Experiment, *, cells: bool, failed: bool
) -> tuple[str, list[str], list[list[str]]]:
    from asyncpp_cli.cluster.queue import Queue

    queue = Queue(experiment)
    title, columns, rows = _table(
        experiment, queue.standings(with_accounting=False), cells=cells, failed=failed
    )
    told = f". {_no_answer(queue)}" if queue.no_answer else ""
    return f"{time.strftime('%H:%M:%S')}  {title}{told}", columns, rows


def _table(
    experiment: Experiment, found: list[Standing], *, cells: bool, failed: bool
) -> tuple[str, list[str], list[list[str]]]:
    counts = Counter(_state(standing) for standing in found)
    title = f"{experiment.name}: {', '.join(f'{count} {state}' for state, count in sorted(counts.items()))}"
    if cells:
        return title, *_of_cells(experiment, found)
    if failed:
        found = [standing for standing in found if _failed(standing)]
    columns = ["run", "state", "step", "saved", "train loss", "tokens/s", "last sign", "reason"]
    rows = [[standing.run.id, *_row(standing)] for standing in found]
    if any(standing.site for standing in found):
        columns[2:2] = ["attempt", "job", "nodes"]
        for row, standing in zip(rows, found, strict=True):
            row[2:2] = [str(standing.status.attempt or ""), standing.job_id, standing.nodes]
    return title, columns, rows


def _of_cells(experiment: Experiment, found: list[Standing]) -> tuple[list[str], list[list[str]]]:
    """A row for each cell, but for its seed: how many of its runs stand how, and their mean training loss."""
    axes = [axis for axis in experiment.cells[0].axes if axis != "seed"]
    told = [
        axis for axis in axes if len({str(cell.axes.get(axis)) for cell in experiment.cells}) > 1
    ] or axes[:1]
    by_cell: dict[tuple[str, ...], list[Standing]] = {}
    for cell, standing in zip(experiment.cells, found, strict=True):
        by_cell.setdefault(tuple(printed(axis, cell.axes.get(axis)) for axis in told), []).append(standing)
    states = sorted({_state(standing) for standing in found})
    rows = []
    for values, standings in by_cell.items():
        counts = Counter(_state(standing) for standing in standings)
        losses = [loss for each in standings if (loss := each.status.train_loss) is not None]
        steps, of = (sum(getattr(each.status, name) for each in standings) for name in ("step", "steps"))
        rows.append(
            [
                *values,
                str(len(standings)),
                *(str(counts[state] or "") for state in states),
                f"{100 * steps // of}%" if of else "",
                f"{sum(losses) / len(losses):.3f}" if losses else "",
            ]
        )
    return [*told, "runs", *states, "of steps", "train loss"], rows


def _failed(standing: Standing) -> bool:
    return _state(standing) == State.FAILED


def _state(standing: Standing) -> str:
    """The run's state; `queued` where it is to go on by itself, and `unknown` where it may be."""
    if standing.is_queued:
        return "queued"
    ended = standing.status.state in ("completed", "running")
    return str(standing.status.state) if standing.queue_known or ended else "unknown"


def _row(standing: Standing) -> list[str]:
    from asyncpp_cli.console import duration

    status = standing.status
    reasons = [standing.pending_reason, status.reason] if standing.is_queued else [status.reason]
    if _state(standing) == "unknown":
        reasons = [f"queued, or {status.state}", *reasons]
    reason = "; ".join(text for text in reasons if text)
    if status.attempt == 0:
        return [_state(standing), "", "", "", "", "", reason]
    saved_step = standing.run.saved_step
    return [
        _state(standing),
        f"{status.step}/{status.steps}",
        str(saved_step) if saved_step is not None else "",
        f"{status.train_loss:.3f}" if status.train_loss is not None else "",
        f"{status.tokens_per_second:,.0f}" if status.tokens_per_second is not None else "",
        f"{duration(time.time() - status.updated)} ago" if status.updated is not None else "",
        reason,
    ]
