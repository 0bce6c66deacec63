"""`asyncpp status`: how the runs of an experiment stand."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from asyncpp_cli.runs import Status


def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the experiment.")],
    as_json: Annotated[bool, typer.Option("--json", help="A list of runs, on standard output.")] = False,
) -> None:
    """Show how each run stands: state, step, newest checkpoint, training loss, throughput, last sign, and why
    it ended.

    A run whose processes have all vanished is marked failed.
    """
    from asyncpp_cli.cluster.attempts import look
    from asyncpp_cli.console import show_table
    from asyncpp_cli.runs import open_experiment

    experiment = open_experiment(folder)
    statuses = [(cell, look(experiment.run(cell.id))) for cell in experiment.cells]
    if as_json:
        content = [
            {"id": cell.id, "axes": cell.axes}
            | asdict(status)
            | {"saved_step": experiment.run(cell.id).saved_step}
            for cell, status in statuses
        ]
        print(json.dumps(content, indent=1))
        return
    counts = Counter(str(status.state) for _, status in statuses)
    title = f"{experiment.name}: {', '.join(f'{count} {state}' for state, count in sorted(counts.items()))}"
    columns = ["run", "state", "step", "saved", "train loss", "tokens/s", "last sign", "reason"]
    show_table(
        columns,
        [[cell.id, *_row(status, experiment.run(cell.id).saved_step)] for cell, status in statuses],
        title=title,
    )


def _row(status: Status, saved_step: int | None) -> list[str]:
    from asyncpp_cli.console import duration

    if status.attempt == 0:
        return [str(status.state), "", "", "", "", "", status.reason]
    return [
        str(status.state),
        f"{status.step}/{status.steps}",
        str(saved_step) if saved_step is not None else "",
        f"{status.train_loss:.3f}" if status.train_loss is not None else "",
        f"{status.tokens_per_second:,.0f}" if status.tokens_per_second is not None else "",
        f"{duration(time.time() - status.updated)} ago" if status.updated is not None else "",
        status.reason,
    ]
