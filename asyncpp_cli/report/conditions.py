"""What the numbers were measured under: it stands below every table and in every JSON cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from asyncpp_cli.report.aggregate import Cell, Run

GEOMETRY_KEYS = {
    "stages": "parallel.stages",
    "microbatches": "schedule.microbatches",
    "microbatch_size": "train.microbatch_size",
    "context": "data.context",
    "steps": "train.steps",
}
"""Configuration keys that say how much a step computes and in how many pieces."""

MACHINE_FIELDS = ("host", "device", "threads", "torch", "python", "parameters", "tokens_per_step", "replayed")
"""Fields of a `start` row that say where and with what a run ran."""


def asyncpp_version() -> str:
    """The installed version; "unknown" in a checkout that was never installed."""
    try:
        return version("asyncpp")
    except PackageNotFoundError:
        return "unknown"


def conditions(runs: Iterable[Run]) -> dict[str, list[Any]]:
    """For each condition the distinct values that the runs had, in order of appearance; none if unknown."""
    found: dict[str, list[Any]] = {name: [] for name in (*GEOMETRY_KEYS, *MACHINE_FIELDS)}
    for run in runs:
        values = {name: run.config.get(key) for name, key in GEOMETRY_KEYS.items()} if run.config else {}
        values |= (
            {name: run.measurement.start.get(name) for name in MACHINE_FIELDS}
            if run.measurement.start
            else {}
        )
        for name, value in values.items():
            if value is not None and value not in found[name]:
                found[name].append(value)
    return found


def conditions_lines(cells: Sequence[Cell]) -> list[str]:
    """The conditions of a whole report, as lines for people; where runs differ, all values are named."""
    found = conditions(run for cell in cells for run in cell.runs)

    def values(name: str) -> str:
        return " or ".join(_readable(value) for value in found[name]) or "?"

    geometry = (
        f"Conditions: {values('stages')} stages; {values('microbatches')} micro-batches x "
        f"{values('microbatch_size')} sequences x {values('context')} tokens = "
        f"{values('tokens_per_step')} tokens a step; "
        f"{values('steps')} steps; {values('parameters')} parameters"
    )
    machine = (
        f"asyncpp {asyncpp_version()}, torch {values('torch')}, Python {values('python')}; "
        f"host {values('host')}, device {values('device')}, threads a process {values('threads')}"
    )
    if True in found["replayed"]:
        replayed = (
            "Replayed runs took the turns of all ranks in one process: they have no throughput and no bubble."
        )
        return [geometry, machine, replayed]
    return [geometry, machine]


def _readable(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
