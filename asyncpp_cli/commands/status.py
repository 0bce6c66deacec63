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

if TYPE_CHECKING:
    from asyncpp_cli.cluster.queue import Queue, Standing
    from asyncpp_cli.runs import Experiment

_SECONDS_BETWEEN_LOOKS = 2.0
_INTERRUPTED_CODE = 130


def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the experiment.")],
    as_json: Annotated[bool, typer.Option("--json", help="A list of runs, on standard output.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every two seconds.")] = False,
) -> None:
    """Show how each run stands: state, step, newest checkpoint, training loss, throughput, last sign, and why
    it ended; on a cluster also the attempt, the job, its nodes, and why it waits.

    A run whose processes have all vanished is marked failed.
    """
    from asyncpp_cli.cluster.queue import Queue
    from asyncpp_cli.console import say, show_table
    from asyncpp_cli.runs import open_experiment

    experiment = open_experiment(folder)
    if watch and as_json:
        raise UserError("--watch shows a table; for scripts, ask `--json` again and again")
    if watch:
        _watch(experiment)
        return
    queue = Queue(experiment)
    found = queue.standings(with_accounting=True)
    if as_json:
        print(json.dumps(_as_json(experiment, found), indent=1))
        return
    title, columns, rows = _table(experiment, found)
    show_table(columns, rows, title=title)
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


def _watch(experiment: Experiment) -> None:
    from rich.live import Live

    from asyncpp_cli.console import console, show_table, table_of

    if not console().is_terminal:
        try:
            while True:
                title, columns, rows = _looked_at(experiment)
                show_table(columns, rows, title=title)
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED_CODE) from None
    with Live(console=console(), auto_refresh=False, vertical_overflow="visible") as live:
        try:
            while True:
                title, columns, rows = _looked_at(experiment)
                live.update(table_of(columns, rows, title=title), refresh=True)
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED_CODE) from None


def _looked_at(experiment: Experiment) -> tuple[str, list[str], list[list[str]]]:
    from asyncpp_cli.cluster.queue import Queue

    queue = Queue(experiment)
    title, columns, rows = _table(experiment, queue.standings(with_accounting=False))
    told = f". {_no_answer(queue)}" if queue.no_answer else ""
    return f"{time.strftime('%H:%M:%S')}  {title}{told}", columns, rows


def _table(experiment: Experiment, found: list[Standing]) -> tuple[str, list[str], list[list[str]]]:
    counts = Counter(_state(standing) for standing in found)
    title = f"{experiment.name}: {', '.join(f'{count} {state}' for state, count in sorted(counts.items()))}"
    columns = ["run", "state", "step", "saved", "train loss", "tokens/s", "last sign", "reason"]
    rows = [[standing.run.id, *_row(standing)] for standing in found]
    if any(standing.site for standing in found):
        columns[2:2] = ["attempt", "job", "nodes"]
        for row, standing in zip(rows, found, strict=True):
            row[2:2] = [str(standing.status.attempt or ""), standing.job_id, standing.nodes]
    return title, columns, rows


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
