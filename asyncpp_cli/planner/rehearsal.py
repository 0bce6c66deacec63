"""Rehearses every rank of a run at its real size with fake tensors, and compares it with the plan."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncpp_cli.base.outputs import write_output
from asyncpp_cli.planner.memory import GB, OF_THE_DEVICE, planned_memory
from asyncpp_cli.planner.sharding import by_rule, memory_of_run
from stages.config.run_config import RunConfig
from stages.config.segments import as_trained, is_sharded, segment_program, shards_of, sync_steps
from stages.rehearsal.rank import Rehearsal, rehearse_rank
from stages.shape.families import describe
from stages.shape.optimizer_sharding import assign_owners
from stages.shape.partition import cut_of, stage_parameters
from stages.shape.sharded_layout import Layout, values

TOLERANCE = 0.05
"""Share of the planned memory by which a rank may differ from it."""

SEGMENT_BYTES = 20 * 2**20
"""What torch's allocator takes from a GPU at once for a tensor between 1 and 10 MiB. A smaller difference
decides nothing, however large a share of a small model it is."""

NOT_REHEARSED = (
    "kernels, times and numbers",
    "NCCL, its order and its memory: messages arrive at once",
    "the compiler's kernels: compiled blocks run as its graphs, operator by operator",
    "streams, and what torch's allocator cannot reuse",
    "reading of data and checkpoints, writing of checkpoints, start and end of a run",
)
"""What only a GPU, or a run, shows."""


@dataclass(frozen=True, kw_only=True)
class ComparedRank:
    """A rank that was rehearsed, beside the plan."""

    number: int
    """Its rank in the pipeline; of a model in shards, its process."""
    found: Rehearsal
    planned: Counter[str] | None
    """Bytes of tensors by kind; None: the model is the user's own, which cannot be planned."""
    planned_flops: float | None
    """FLOPs planned for the micro-batches that were rehearsed."""

    @property
    def flops(self) -> float:
        """FLOPs of the program's actions that were rehearsed."""
        return sum(self.found.flops[phase] for phase in ("F", "B", "I", "W", "S", "T"))

    @property
    def difference(self) -> float | None:
        """Difference of the peak memory from the plan, as a share of the plan."""
        return None if self.planned is None else self.found.peak_bytes / sum(self.planned.values()) - 1

    @property
    def is_as_planned(self) -> bool:
        """Whether memory differs from the plan by less than `TOLERANCE` or `SEGMENT_BYTES`,
        or the compiler keeps less."""
        if self.planned is None or self.keeps_less:
            return True
        planned = sum(self.planned.values())
        return abs(self.found.peak_bytes - planned) <= max(TOLERANCE * planned, SEGMENT_BYTES)

    @property
    def keeps_less(self) -> bool:
        """Whether memory is below the plan since the compiler chose to keep less of a block."""
        return self.found.compiled and self.difference is not None and self.difference < -TOLERANCE

    def record(self, config: RunConfig) -> dict[str, str | int | float | None]:
        """All numbers, for a file. Bytes are those of the peak; kinds that neither holds are left out."""
        found, schedule = self.found, config.schedule
        numbers: dict[str, str | int | float | None] = {
            "model": config.model.name,
            "schedule": schedule.name + "+split" * schedule.split,
            "stages": config.parallel.stages,
            "data": config.parallel.data,
            "compiled": int(self.found.compiled),
            "rank": self.number,
            "of_stages": " ".join(map(str, found.stages)),
            "found_bytes": found.peak_bytes,
            "planned_bytes": None if self.planned is None else sum(self.planned.values()),
            "peak_in": found.peak_phase,
            "waits": sum(found.hot_waits.values()),
            "faults": sum(found.faults.values()),
            "found_flops": self.flops,
            "planned_flops": self.planned_flops,
            "core_seconds": round(found.seconds, 1),
            "process_bytes": found.process_bytes,
        }
        for kind, gb, planned_gb in sorted(self.by_kind()):
            numbers[f"found_{kind}"], numbers[f"planned_{kind}"] = round(gb * GB), round(planned_gb * GB)
        return numbers

    def by_kind(self) -> Iterator[tuple[str, float, float]]:
        """(kind, GB found, GB planned), the kinds that differ most first."""
        planned: Counter[str] = Counter() if self.planned is None else self.planned
        kinds = sorted(
            self.found.peak.keys() | planned.keys(),
            key=lambda kind: -abs(self.found.peak[kind] - planned[kind]),
        )
        for kind in kinds:
            yield kind, self.found.peak[kind] / GB, planned[kind] / GB


def write_csv(file: Path, records: Sequence[Mapping[str, str | int | float | None]]) -> None:
    """A row for each record; a kind of memory that one of them lacks is empty there."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_output(file, text.getvalue().encode())


def ranks_of(config: RunConfig) -> range:
    """Numbers of the ranks of a pipeline, or of the processes that hold a model in shards."""
    parallel = as_trained(config).parallel
    return range(parallel.data if is_sharded(config) else parallel.stages)


def fullest_of(config: RunConfig) -> Sequence[int]:
    """The ranks that differ: all of a pipeline, and of processes with shards the one that holds most."""
    if not is_sharded(config):
        return ranks_of(config)
    return [0 if config.model.factory is not None else _fullest_process(as_trained(config))]


def rehearse(config: RunConfig, *, device: str, ranks: Sequence[int] | None = None) -> Iterator[ComparedRank]:
    """Rehearse ranks of a run one after another, those of a pipeline as the data rank that holds most.

    Args:
        config: a valid configuration.
        device: `cuda` or `cpu`: the kind of device that is pretended.
        ranks: some of `ranks_of`; None: `fullest_of`.
    """
    config = as_trained(replace(config, site=replace(config.site, device=device)))
    sharded, own = is_sharded(config), config.model.factory is not None
    rank_of_stage = segment_program(config, first_step=sync_steps(config), steps=1).rank_of_stage
    planned: list[dict[str, int]] | None = None
    if not own:  # what is not planned for is rehearsed alone
        planned = [memory_of_run(config)] if sharded else planned_memory(config)
    for number in fullest_of(config) if ranks is None else ranks:
        rank = 0 if sharded else number
        stages = [stage for stage, holder in enumerate(rank_of_stage) if holder == rank]
        data_rank = number if sharded else 0 if own else _fullest_data_rank(config, stages)
        found = rehearse_rank(config, rank=rank, data_rank=data_rank, device=device)
        memory = None
        if planned is not None:
            memory = Counter({kind: n for kind, n in planned[rank].items() if kind not in OF_THE_DEVICE})
        flops = None if own else found.microbatches * _flops(config, stages)
        yield ComparedRank(number=number, found=found, planned=memory, planned_flops=flops)


def _fullest_process(config: RunConfig) -> int:
    """The process with most values in its shards and in matrices that it owns beside them."""
    parameters = [*describe(config.model).whole()]
    by_value = {parameter.name for parameter in by_rule(config)[0]}
    layout = Layout(
        names=tuple(parameter.name for parameter in parameters),
        shapes=tuple(parameter.shape for parameter in parameters),
        in_place=tuple(parameter.name in by_value for parameter in parameters),
        processes=config.parallel.data,
        shards=shards_of(config),
    )

    def held(process: int) -> int:
        own = [piece for piece in layout.owned(process) if layout.moves(piece.parameter)]
        pieces = [*layout.held(process), *own]
        return sum(values(layout.shapes[piece.parameter], piece.rows) for piece in pieces)

    return max(range(layout.processes), key=held)


def _fullest_data_rank(config: RunConfig, stages: Sequence[int]) -> int:
    cuts = cut_of(config)
    held = [0] * config.parallel.data
    for stage in stages:
        shapes = [parameter.shape for parameter in stage_parameters(config.model, cuts[stage])]
        parts = assign_owners(shapes, data_ranks=config.parallel.data).parts
        held = [before + part for before, part in zip(held, parts, strict=True)]
    return held.index(max(held))


def _flops(config: RunConfig, stages: Sequence[int]) -> float:
    """FLOPs of a micro-batch's forward and backward in these stages."""
    spec, cuts = describe(config.model), cut_of(config)
    parts = [spec.halves[half] for stage in stages for half in cuts[stage].halves]
    parts += [spec.head for stage in stages if cuts[stage].has_head]
    tokens, context = config.train.microbatch_size * config.data.context, config.data.context
    shards = sum(len(cuts[stage].head_rows or ()) for stage in stages) / config.model.vocab_size
    return tokens * (
        sum(part.training_flops(context=context) for part in parts)
        + shards * spec.head.training_flops(context=context)
    )
