"""The conditions of the measurements, shown below every table and in every record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.load.run import RunResult
from asyncpp_cli.runs.attempts.cost import cost_text, total
from stages.rows import Start

GEOMETRY_KEYS = {
    "stages": "parallel.stages",
    "data_parallel": "parallel.data",
    "microbatches": "schedule.microbatches",
    "microbatch_size": "train.microbatch_size",
    "context": "data.context",
    "steps": "train.steps",
    "precision": "train.precision",
}
"""Configuration keys for the size of a step and how it is divided."""

MACHINE_FIELDS = (
    *("asyncpp", "commit", "torch", "python", "host", "device", "threads"),
    *("parameters", "active_parameters", "tokens_per_step", "replayed", "corpus_sha256"),
    "attention_share",
)
"""Fields of a `start` row for machine, versions and data."""

CROWDED = 1.25
"""Load average per core from which times are called unreliable: a launcher and its supervisors add a little
to the ranks of a launch, which have a core each."""

_MOST_VALUES = 5
"""Values of a condition that a line names; records name all."""


def conditions(runs: Iterable[RunResult]) -> dict[str, list[Any]]:
    """For each condition its distinct values over the runs, in order of appearance; empty if unknown."""
    found = []
    for run in runs:
        config, start = run.config or {}, run.start
        values = {name: config.get(key) for name, key in GEOMETRY_KEYS.items()}
        values |= {name: getattr(start, name, None) for name in MACHINE_FIELDS}
        found.append({name: value for name, value in values.items() if value is not None})
    return {name: [] for name in (*GEOMETRY_KEYS, *MACHINE_FIELDS)} | distinct(found)


def distinct(mappings: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The distinct values of each key, in order of appearance."""
    values: dict[str, list[Any]] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            known = values.setdefault(key, [])
            if value not in known:
                known.append(value)
    return values


def conditions_lines(cells: Sequence[CellResult]) -> list[str]:
    """The conditions of a report as lines of text, with all values where runs differ."""
    runs = [run for cell in cells for run in cell.runs]
    starts = [run.start for run in runs if run.start is not None]
    known = conditions(runs)
    known["steps"] = conditions(run for run in runs if run.loss_of is None)["steps"]

    def values(name: str) -> str:
        return " or ".join(_first([_readable(value) for value in known[name]])) or "?"

    replicas = (
        f" x {values('data_parallel')} data-parallel" if known["data_parallel"] not in ([], [1]) else ""
    )
    stages = "stage" if known["stages"] == [1] else "stages"
    several = "" if known["microbatches"] == [1] else "es"
    active = known["active_parameters"] not in ([], known["parameters"])
    parameters = f"{values('parameters')} parameters" + f" ({values('active_parameters')} active)" * active
    geometry = (
        f"Conditions: {values('stages')} {stages}{replicas}; {values('microbatches')} micro-batch{several} x "
        f"{values('microbatch_size')} sequences x {values('context')} tokens = "
        f"{values('tokens_per_step')} tokens per step; "
        f"{values('steps')} steps; {parameters}; {values('precision')}"
    )
    commit = f" (commit {values('commit')})" if known["commit"] else ""
    machine = (
        f"asyncpp {values('asyncpp')}{commit}, torch {values('torch')}, Python {values('python')}; "
        f"host {values('host')}, device {values('device')}, threads per process {values('threads')}"
    )
    lines = [geometry, machine]
    if known["corpus_sha256"]:
        lines.append(f"Data: SHA-256 {values('corpus_sha256')}")
    if shares := [share for share in known["attention_share"] if isinstance(share, float)]:
        masked = " or ".join(f"{1 - share:.0%}" for share in shares[:_MOST_VALUES])
        lines.append(f"Attention within documents: {masked} of causal attention is masked")
    lines += _source_lines(starts)
    lines += _evaluation_lines(cells, starts)
    if True in known["replayed"]:
        lines.append(
            "Replayed runs ran all ranks in turn in one process: they have no throughput and no bubble."
        )
    lines += _unsettled_lines(cells)
    lines += _compiled_lines(runs)
    if any(start.shared_gpu for start in starts):
        lines.append(
            "Processes shared a GPU and sent messages through host memory: their throughput says little."
        )
    lines += filter(None, [busy_text(cells)])
    lineages = [run.lineage.text for run in runs if run.lineage is not None]
    lines += [f"A run {text}" for text in lineages[:_MOST_VALUES]]
    if len(lineages) > _MOST_VALUES:
        lines.append(f"{len(lineages) - _MOST_VALUES} further runs continue others")
    if (cost := total(cell.cost for cell in cells)) is not None:
        lines.append(f"Cost of all runs and all their attempts: {cost_text(cost)}")
    if any(start.bytes_per_token is None for start in starts):
        lines.append("Runs on token shards of unknown bytes per token have no bits per byte.")
    return lines


def _unsettled_lines(cells: Sequence[CellResult]) -> list[str]:
    """The predicted bubbles of segments that are too short for their pipelines to settle."""
    lines = set()
    for cell in cells:
        for run in cell.runs:
            found = run.prediction
            if found is not None and found.of_segment is not None:
                steps, bubble = found.of_segment
                lines.add(
                    f"A pipeline of {cell.schedule} takes longer to settle than a segment of {steps} steps: "
                    f"its predicted bubble is {bubble:.0%} there, {found.bubble:.0%} in the long run."
                )
    return sorted(lines)


def _source_lines(starts: Sequence[Start]) -> list[str]:
    """The shares of mixtures."""
    mixtures: dict[str, None] = {}
    for start in starts:
        shares = [
            f"{name} {source.share:.3g} ({source.tokens:,} tokens)"
            for name, source in (start.sources or {}).items()
        ]
        if shares:
            mixtures[", ".join(shares)] = None
    return [f"Shares of the sources in sequences: {'; or '.join(_first(list(mixtures)))}"] if mixtures else []


def _first(texts: Sequence[str]) -> list[str]:
    """The first of them, and the number of the others."""
    others = len(texts) - _MOST_VALUES
    return [*texts[:_MOST_VALUES], *([f"{others} other{'s' * (others > 1)}"] if others > 0 else [])]


def _evaluation_lines(cells: Sequence[CellResult], starts: Sequence[Start]) -> list[str]:
    """How far a loss is uncertain by the text that was read, which no seed shows, and over seeds."""
    measured = [run.val_loss_error for cell in cells for run in cell.completed]
    errors = [error for error in measured if error is not None and math.isfinite(error)]
    if not errors:
        return []
    spreads = [cell.val_loss for cell in cells if cell.val_loss is not None]
    of_means = [
        each.std / each.n**0.5 for each in spreads if each.std is not None and math.isfinite(each.std)
    ]
    over_seeds = f"; over seeds, of a mean: {span(of_means, '{:.2g}')}" if of_means else ""
    lines = [
        f"Standard error of a validation loss, from an evaluation's micro-batches: {span(errors, '{:.2g}')} "
        f"nats per token{over_seeds}; gaps are more certain than losses, because all runs read the same text"
    ]
    read: dict[str, None] = {}
    for start in starts:
        for name, of in (start.validation or {}).items():
            read[f"{name} {of.evaluated_tokens:,} of {of.tokens:,} tokens"] = None
    return [*lines, f"Read in an evaluation: {', '.join(read)}"] if read else lines


def span(values: Sequence[float], form: str) -> str:
    """The least and the largest value; one of them if they look the same."""
    least, most = form.format(min(values)), form.format(max(values))
    return least if least == most else f"{least} to {most}"


def busy_text(cells: Iterable[CellResult]) -> str | None:
    """That the machine had more to do than these cells' runs, and what follows; None if it had not."""
    runs = {id(run): run for cell in cells for run in cell.runs}.values()
    loads = [run.load_per_core or 0.0 for run in runs if not run.replayed]
    busy = [load for load in loads if load > CROWDED]
    if not busy:
        return None
    return (
        f"The machine was busy during {len(busy)} of {len(loads)} runs (up to {max(busy):.1f} processes per "
        "core): do not trust the speeds"
    )


def _compiled_lines(runs: Sequence[RunResult]) -> list[str]:
    """What compiling cost, where blocks were compiled."""
    compiled = [run for run in runs if getattr(run.start, "compiled", False)]
    if not compiled:
        return []
    which = (
        "Blocks were compiled"
        if len(compiled) == len(runs)
        else f"{len(compiled)} runs compiled their blocks"
    )
    seconds = [run.first_step_seconds for run in compiled if run.first_step_seconds is not None]
    if not seconds:
        return [f"{which}."]
    took = span(seconds, "{:.3g}")
    return [f"{which}: the first step took {took} s, which throughput leaves out."]


def _readable(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
