"""`asyncpp status`: the state of an experiment's runs."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.base.errors import INTERRUPTED, UserError
from asyncpp_cli.base.tables import Fit, printed
from asyncpp_cli.runs.status import CLOCK_MARGIN, State, Status

if TYPE_CHECKING:
    from asyncpp_cli.runs.attempts.cost import Cost
    from asyncpp_cli.runs.experiment_folder import Experiment
    from asyncpp_cli.runs.run_folder import Run
    from asyncpp_cli.slurm.run_status import RunStatus, SlurmQueue

_POLL_SECONDS = 2.0
_FIT = Fit(
    hide=["cost", "nodes", "saved", "attempt", "tokens/s", "last sign", "train loss", "job"],
    fold=["reason"],
)


def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the experiment.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of runs.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Update every two seconds.")] = False,
    cells: Annotated[
        bool, typer.Option("--cells", help="One line per cell, with its seeds together.")
    ] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Only failed runs.")] = False,
) -> None:
    """Show how the runs of an experiment stand.

    State, step, newest checkpoint, training loss, throughput, cost, last heartbeat and why a run ended; on a
    cluster also the attempt, the job, its nodes, and why it is pending.

    A run whose processes have all vanished is marked failed. On a narrow terminal columns are left out and
    reasons are shown below their runs; --json has everything.
    """
    from asyncpp_cli.base.console import as_plain, say, show_table
    from asyncpp_cli.runs.experiment_folder import open_experiment
    from asyncpp_cli.slurm.run_status import SlurmQueue, hold_notes, status_records

    experiment = open_experiment(folder)
    if cells and (as_json or failed):
        raise UserError("--cells cannot be combined with --json or --failed, which list single runs")
    if watch and as_json:
        raise UserError("--watch cannot be combined with --json; for scripts, call `--json` repeatedly")
    if watch:
        _watch(experiment, cells=cells, failed=failed)
        return
    queue = SlurmQueue(experiment)
    run_statuses = queue.run_statuses(with_accounting=True)
    if as_json:
        shown = [run_status for run_status in run_statuses if not failed or _failed(run_status)]
        print(json.dumps(as_plain(status_records(experiment, shown)), indent=1))
        return
    title, columns, rows = _table(experiment, run_statuses, cells=cells, failed=failed)
    show_table(columns, rows, title=title, fit=_FIT)
    for note in hold_notes(run_statuses):
        say(note)
    if queue.no_answer:
        say(_no_answer(queue))


def _no_answer(queue: SlurmQueue) -> str:
    return f"Which runs are queued is unknown: {queue.no_answer}"


def _watch(experiment: Experiment, *, cells: bool, failed: bool) -> None:
    from rich.live import Live

    from asyncpp_cli.base.console import console, show_table, shown_table
    from asyncpp_cli.slurm.run_status import SlurmQueue, hold_notes

    terminal = console()
    live = Live(console=terminal, auto_refresh=False, vertical_overflow="visible")
    try:
        with live if terminal.is_terminal else nullcontext():
            while True:
                queue = SlurmQueue(experiment)
                run_statuses = queue.run_statuses(with_accounting=False)
                title, columns, rows = _table(experiment, run_statuses, cells=cells, failed=failed)
                notes = [*([_no_answer(queue)] if queue.no_answer else []), *hold_notes(run_statuses)]
                title = ". ".join([f"{time.strftime('%H:%M:%S')}  {title}", *notes])
                if terminal.is_terminal:
                    table = shown_table(columns, rows, title=title, width=terminal.width, fit=_FIT)
                    live.update(table, refresh=True)
                else:
                    show_table(columns, rows, title=title)
                time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _table(
    experiment: Experiment, run_statuses: list[RunStatus], *, cells: bool, failed: bool
) -> tuple[str, list[str], list[list[str]]]:
    from asyncpp_cli.runs.attempts.cost import cost_of_run, cost_text, total

    counts = Counter(_state(run_status) for run_status in run_statuses)
    title = f"{experiment.name}: {', '.join(f'{count} {state}' for state, count in sorted(counts.items()))}"
    costs = {each.run.id: cost_of_run(each.run, each.status) for each in run_statuses}
    if (sum_of_costs := total(costs.values())) is not None:
        title += f"; {cost_text(sum_of_costs)}"
    if cells:
        return title, *_cell_rows(experiment, run_statuses, costs)
    if failed:
        run_statuses = [run_status for run_status in run_statuses if _failed(run_status)]
    columns = ["run", "state", "step", "saved", "train loss", "tokens/s", "cost", "last sign", "reason"]
    rows = [[each.run.id, *_row(each, costs[each.run.id])] for each in run_statuses]
    if any(run_status.site for run_status in run_statuses):
        columns[2:2] = ["attempt", "job", "nodes"]
        for row, run_status in zip(rows, run_statuses, strict=True):
            row[2:2] = [str(run_status.status.attempt or ""), run_status.job_id, run_status.nodes]
    return title, columns, rows


def _cell_rows(
    experiment: Experiment, run_statuses: list[RunStatus], costs: Mapping[str, Cost | None]
) -> tuple[list[str], list[list[str]]]:
    """A row for each cell, its seeds together: runs in each state, mean training loss, cost."""
    from asyncpp_cli.runs.attempts.cost import total

    axes = [axis for axis in experiment.cells[0].axes if axis != "seed"]
    varying = [
        axis for axis in axes if len({str(cell.axes.get(axis)) for cell in experiment.cells}) > 1
    ] or axes[:1]
    by_cell: dict[tuple[str, ...], list[RunStatus]] = {}
    for cell, run_status in zip(experiment.cells, run_statuses, strict=True):
        by_cell.setdefault(tuple(printed(axis, cell.axes.get(axis)) for axis in varying), []).append(
            run_status
        )
    states = sorted({_state(run_status) for run_status in run_statuses})
    rows = []
    for values, run_statuses in by_cell.items():
        counts = Counter(_state(run_status) for run_status in run_statuses)
        losses = [loss for each in run_statuses if (loss := each.status.train_loss) is not None]
        done = sum(each.status.step for each in run_statuses)
        steps = sum(each.status.steps for each in run_statuses)
        rows.append(
            [
                *values,
                str(len(run_statuses)),
                *(str(counts[state] or "") for state in states),
                f"{100 * done // steps}%" if steps else "",
                f"{sum(losses) / len(losses):.3f}" if losses else "",
                _hours(total(costs[each.run.id] for each in run_statuses)),
            ]
        )
    return [*varying, "runs", *states, "of steps", "train loss", "cost"], rows


def _failed(run_status: RunStatus) -> bool:
    return _state(run_status) == State.FAILED


def _state(run_status: RunStatus) -> str:
    """The run's state; `queued` if SLURM will start it, `unknown` if that cannot be known."""
    if run_status.is_queued:
        return "queued"
    ended = run_status.status.state in ("completed", "running")
    return str(run_status.status.state) if run_status.queue_known or ended else "unknown"


def _hours(cost: Cost | None) -> str:
    from asyncpp_cli.runs.attempts.cost import amount

    if cost is None:
        return ""
    return f"{amount(cost.gpu_hours)} GPU-h" if cost.gpu_hours else f"{amount(cost.core_hours)} core-h"


def _row(run_status: RunStatus, cost: Cost | None) -> list[str]:
    from asyncpp_cli.runs.attempts.attempt import Attempt

    status = run_status.status
    reasons = [run_status.pending_reason, status.reason] if run_status.is_queued else [status.reason]
    if _state(run_status) == "unknown":
        reasons = [f"queued, or {status.state}", *reasons]
    if status.state == State.RUNNING:
        reasons.append(Attempt(run_status.run, status.attempt).awaited())
    reason = "; ".join(text for text in reasons if text)
    if status.attempt == 0:
        return [_state(run_status), "", "", "", "", "", "", reason]
    saved_step = run_status.run.saved_step
    return [
        _state(run_status),
        f"{status.step}/{status.steps}",
        str(saved_step) if saved_step is not None else "",
        f"{status.train_loss:.3f}" if status.train_loss is not None else "",
        f"{status.tokens_per_second:,.0f}" if status.tokens_per_second is not None else "",
        _hours(cost),
        _last_sign(run_status.run, status),
        reason,
    ]


def _last_sign(run: Run, status: Status) -> str:
    """How long ago a run showed that it runs, or ended; when, if that is in the future of this machine."""
    from asyncpp_cli.base.console import duration

    if status.updated is None:
        return ""
    # The writer of a heartbeat may be a machine with another clock.
    ago = run.age(run.status_file) if status.state == State.RUNNING else time.time() - status.updated
    if ago < -CLOCK_MARGIN:
        return time.strftime("%F %H:%M", time.localtime(status.updated))
    return f"{duration(max(0.0, ago))} ago"
