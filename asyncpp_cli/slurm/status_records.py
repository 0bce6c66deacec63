"""The status of an experiment's runs as records, as `asyncpp status --json` prints it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncpp_cli.runs.experiment_folder import Experiment
    from asyncpp_cli.slurm.run_status import RunStatus


def status_records(experiment: Experiment, run_statuses: Iterable[RunStatus]) -> list[dict[str, Any]]:
    """A record for each run: its id, its axes (a mapping), its status, and its job on a cluster."""
    axes = {cell.id: cell.axes for cell in experiment.cells}
    return [
        {"id": run_status.run.id, "axes": axes[run_status.run.id]}
        | asdict(run_status.status)
        | {
            "saved_step": run_status.run.saved_step,
            "site": run_status.site,
            "job_id": run_status.job_id,
            "job_state": run_status.job_state,
            "pending_reason": run_status.pending_reason,
            "queue_known": run_status.queue_known,
            "nodes": run_status.nodes,
            "error_lines": run_status.error_lines,
        }
        | _cost(run_status)
        | {"continues": _continues(run_status)}
        for run_status in run_statuses
    ]


def _cost(run_status: RunStatus) -> dict[str, float | None]:
    """Hours of GPUs and cores; None where unknown."""
    from asyncpp_cli.runs.attempts.cost import cost_of_run

    cost = cost_of_run(run_status.run, run_status.status)
    if cost is None:
        return dict.fromkeys(("gpu_hours", "core_hours"))
    return asdict(cost)


def _continues(run_status: RunStatus) -> dict[str, Any] | None:
    """The run that it continues (`asyncpp extend`); None for a run from the beginning."""
    from msgspec import to_builtins

    from asyncpp_cli.base.errors import DamagedError

    try:
        lineage = run_status.run.lineage()
    except DamagedError:
        return None
    if lineage is None:
        return None
    return {key: value for key, value in to_builtins(lineage).items() if key != "format"}
