"""What the numbers were measured under: it stands below every table and in every JSON cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.loaded import Run

GEOMETRY_KEYS = {
    "stages": "parallel.stages",
    "data_parallel": "parallel.data",
    "microbatches": "schedule.microbatches",
    "microbatch_size": "train.microbatch_size",
    "context": "data.context",
    "steps": "train.steps",
    "precision": "train.precision",
}
"""Configuration keys that say how much a step computes and in how many pieces."""

MACHINE_FIELDS = (
    *("asyncpp", "commit", "torch", "python", "host", "device", "threads"),
    *("parameters", "tokens_per_step", "replayed", "corpus_sha256"),
)
"""Fields of a `start` row that say where and with what a run ran."""

_MOST_VALUES = 5
"""Of a condition, for people; the records name them all."""


def conditions(runs: Iterable[Run]) -> dict[str, list[Any]]:
    """For each condition the distinct values that the runs had, in order of appearance; none if unknown."""
    found: dict[str, list[Any]] = {name: [] for name in (*GEOMETRY_KEYS, *MACHINE_FIELDS)}
    for run in runs:
        config, start = run.config or {}, run.measurement.start or {}
        values = {name: config.get(key) for name, key in GEOMETRY_KEYS.items()}
        values |= {name: start.get(name) for name in MACHINE_FIELDS}
        for name, value in values.items():
            if value is not None and value not in found[name]:
                found[name].append(value)
    return found


def conditions_lines(cells: Sequence[Cell]) -> list[str]:
    """The conditions of a whole report, as lines for people; where runs differ, all values are named."""
    found = conditions(run for cell in cells for run in cell.runs)

    def values(name: str) -> str:
        known = [_readable(value) for value in found[name]]
        if len(known) > _MOST_VALUES:
            known = [*known[:_MOST_VALUES], f"{len(known) - _MOST_VALUES} others"]
        return " or ".join(known) or "?"

    replicas = (
        f" x {values('data_parallel')} data-parallel" if found["data_parallel"] not in ([], [1]) else ""
    )
    several = "" if found["microbatches"] == [1] else "es"
    geometry = (
        f"Conditions: {values('stages')} stages{replicas}; {values('microbatches')} micro-batch{several} x "
        f"{values('microbatch_size')} sequences x {values('context')} tokens = "
        f"{values('tokens_per_step')} tokens a step; "
        f"{values('steps')} steps; {values('parameters')} parameters; {values('precision')}"
    )
    commit = f" (commit {values('commit')})" if found["commit"] else ""
    machine = (
        f"asyncpp {values('asyncpp')}{commit}, torch {values('torch')}, Python {values('python')}; "
        f"host {values('host')}, device {values('device')}, threads a process {values('threads')}"
    )
    lines = [geometry, machine]
    if found["corpus_sha256"]:
        lines.append(f"Data: SHA-256 {values('corpus_sha256')}")
    if True in found["replayed"]:
        lines.append(
            "Replayed runs took the turns of all ranks in one process: they have no throughput and no bubble."
        )
    starts = [run.measurement.start for cell in cells for run in cell.runs]
    if any(start is not None and start.get("shared_gpu") for start in starts):
        lines.append(
            "Processes shared a GPU and sent through the host's memory: their throughput says little."
        )
    if any(start is not None and start.get("bytes_per_token", 1) is None for start in starts):
        lines.append(
            "Without bits per byte are runs on token shards that do not say how many bytes of text a token "
            "stands for."
        )
    return lines


def _readable(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
