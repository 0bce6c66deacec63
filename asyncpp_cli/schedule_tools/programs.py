"""Programs and costs from the arguments of `asyncpp schedule`, or as a run measured them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncpp_cli.base.console import command, say
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.runs.experiment_folder import run_at
from asyncpp_cli.schedule_tools.options import AllTimes, Geometry
from asyncpp_cli.schedule_tools.output import comparison_row
from schedules import (
    FAMILY,
    OPTIONS,
    Program,
    ScheduleError,
    build,
    find,
    find_problems,
    is_custom,
    options_taken,
)
from schedules.catalogue import least_lead
from schedules.costs import Costs, RankTimes, uniform_costs, with_measured_ranks
from schedules.io.program_file import from_text
from schedules.library.v_block import EVEN_COSTS, BlockCosts, whole_costs
from schedules.simulate import Timeline, simulate
from schedules.step_time import NotPeriodicError, StepTime, step_graph, step_graph_of
from stages.config.records import read_text
from stages.rows import RowError, Segment, Start


@dataclass(frozen=True, kw_only=True)
class CostOptions(AllTimes):
    """All times of a simulation, in one unit."""

    head: float = 0.0
    measured: RankTimes | None = None
    """Measured times of every rank, which replace those of computing and `update`; None: not measured."""

    @property
    def block(self) -> BlockCosts:
        """The costs that a periodic block is made for."""
        if self.measured is not None:
            halves = (self.measured.forward, self.measured.input_half, self.measured.weight_half)
            return whole_costs(*map(sum, halves))
        return whole_costs(self.forward, self.input_half, self.weight_half)

    def of(self, program: Program) -> Costs:
        """The costs of `program`."""
        times = {name: value for name, value in vars(self).items() if name != "measured"}
        try:
            costs = uniform_costs(program, **times)
            return costs if self.measured is None else with_measured_ranks(costs, program, self.measured)
        except ScheduleError as error:
            raise UserError(str(error)) from error


def is_file(name: str) -> bool:
    """Whether `name` is a file: no schedule's name, and it looks like a path or exists."""
    return name not in FAMILY and not is_custom(name) and ("/" in name or "." in name or Path(name).is_file())


MOST_ACTIONS = 2_000_000
"""Actions of a program at most: building and simulating as many takes a quarter of a minute."""

_MOST_BYTES = 1 << 25
"""Size of a program file at most; an action takes about 8 bytes."""


def refuse_huge(name: str, *, stages: int, microbatches: int, steps: int) -> None:
    """Refuse a program that would take minutes, and gigabytes, to build.

    Args:
        name: of the schedule or file.
        stages: of the program, all chunks counted.
        microbatches: per step.
        steps: of the program.

    Raises:
        UserError: a forward and a backward of each are more than `MOST_ACTIONS`.
    """
    actions = 2 * stages * microbatches * steps
    if min(stages, microbatches) > 0 and actions > MOST_ACTIONS:
        raise UserError(
            f"{name}: {stages:,} stages, {microbatches:,} micro-batches per step and {steps:,} steps are "
            f"{actions:,} actions; accepted: {MOST_ACTIONS:,} at most, so fewer stages, micro-batches or "
            "--steps"
        )


def read_program(file: Path) -> Program:
    """Read a program file (not verified)."""
    try:
        return from_text(read_text(file, most=_MOST_BYTES), file=str(file))
    except ScheduleError as error:
        raise UserError(_first_line(str(error))) from error


def program(
    name: str,
    geometry: Geometry,
    *,
    steps: int,
    first_step: int = 0,
    costs: BlockCosts = EVEN_COSTS,
    shard_head: bool = False,
) -> Program:
    """The verified program of schedule `name`, or of a file, which has its own number of steps.

    Args:
        name: of the schedule, or its file.
        geometry: that the schedule is built with.
        steps: of the program.
        first_step: its first one.
        costs: those of a periodic block.
        shard_head: whether the head is in shards on all ranks.
    """
    if is_file(name):
        program_read = read_program(Path(name))
        problems = find_problems(program_read)
        if problems:
            see = command("schedule", "check", Path(name))
            raise UserError(f"{name}: {_first_line(chr(10).join(problems))} (see: {see})")
        return program_read
    try:
        if not is_custom(name):
            find(name)  # an unknown name is what to mend first
        for option, value in (("--stages", geometry.stages), ("--microbatches", geometry.microbatches)):
            if value is None:
                raise UserError(f"{option} is missing: {name} needs --stages and --microbatches")
        stages = _stages(name, geometry, costs)
        refuse_huge(name, stages=stages, microbatches=geometry.microbatches or 0, steps=steps)
        taken = _taken(name, geometry, costs)
        return build(name, steps=steps, first_step=first_step, shard_head=shard_head, **taken)
    except ScheduleError as error:
        raise UserError(str(error)) from error


def _stages(name: str, geometry: Geometry, costs: BlockCosts) -> int:
    """Stages of a schedule, all chunks counted; of a custom schedule at least so many."""
    chunks = FAMILY[name].stages_per_rank if name in FAMILY else 1
    return (geometry.stages or 0) * int(_taken(name, geometry, costs).get("chunks", chunks))


def _taken(name: str, geometry: Geometry, costs: BlockCosts) -> dict[str, Any]:
    """The arguments that schedule `name` takes; a comparison may have others for other schedules."""
    taken: dict[str, Any] = {"stages": geometry.stages, "microbatches": geometry.microbatches}
    options = options_taken(name)
    return taken | {option: value for option, value in _options(geometry, costs).items() if option in options}


def _options(geometry: Geometry, costs: BlockCosts) -> dict[str, Any]:
    """The options that are set, over the defaults of `asyncpp schedule`."""
    return {"costs": costs, "chunks": 2, **_given(geometry)}


def _given(geometry: Geometry) -> dict[str, Any]:
    flags = {name: value for name, value in vars(geometry).items() if name in OPTIONS}
    return {name: value for name, value in flags.items() if value is not None}


def note_delay(
    names: Sequence[str],
    geometry: Geometry,
    costs: BlockCosts = EVEN_COSTS,
    *,
    shard_head: bool = False,
) -> None:
    """Print a note on standard error for each schedule that cannot have a delay of 1."""
    if geometry.delay is not None:
        return
    stages, microbatches = geometry.stages or 1, geometry.microbatches or 1
    for name in names:
        if name not in FAMILY:
            continue
        least = least_lead(name, stages=stages, shard_head=shard_head, **_options(geometry, costs))
        if least is None:
            continue
        delay = -(-least // microbatches)
        if delay > 1:
            say(
                f"{name}: a delay of 1 needs {least} micro-batches per step on {stages} ranks; "
                f"the smallest delay with {microbatches} is {delay}, which is taken"
            )


def refuse_untaken(names: Sequence[str], geometry: Geometry) -> None:
    """Refuse an option that none of the schedules takes, rather than ignore it."""
    taken = [FAMILY[name].options for name in names if name in FAMILY]
    for option, value in _given(geometry).items():
        if taken and not any(option in of_one for of_one in taken):
            raise UserError(f"--{option.replace('_', '-')} {value}: not an option of {', '.join(names)}")


def steady_state(
    name: str,
    geometry: Geometry,
    costs: CostOptions,
    *,
    steps: int | None = None,
    shard_head: bool = False,
) -> tuple[StepTime, Program]:
    """The time of a step of a schedule, or of a file, in the long run; and the program of a segment.

    Args:
        name: of the schedule, or its file.
        geometry: that the schedule is built with.
        costs: times of actions and messages.
        steps: of the segment; None: as few as have a steady middle.
        shard_head: whether the head is in shards on all ranks.
    """

    def build_steps(steps: int) -> Program:
        return program(name, geometry, steps=steps, costs=costs.block, shard_head=shard_head)

    reduced = costs.reduction > 0
    try:
        if is_file(name):
            segment = build_steps(1)
            graph = step_graph(segment, reduced=reduced)
        else:
            # Less than a delay's steps do not show it.
            graph, segment = step_graph_of(build_steps, reduced=reduced, steps=4 + (geometry.delay or 0))
        step = graph.step_time(costs.of(segment))
    except NotPeriodicError as error:
        remedy = "; write the file with more steps" if is_file(name) else ""
        raise UserError(f"{error}{remedy}") from error
    return step, segment if steps is None or is_file(name) else build_steps(steps)


def timeline(of: Program, costs: CostOptions) -> Timeline:
    """The simulated timeline of `of`."""
    return simulate(of, costs.of(of))


def comparison(
    names: Sequence[str],
    geometry: Geometry,
    costs: CostOptions,
    *,
    steps: int | None = None,
    shard_head: bool = False,
) -> list[dict[str, Any]]:
    """The rows of `compare` for the schedules called `names`; other arguments are those of `steady_state`."""
    rows = []
    for name in names:
        step, segment = steady_state(name, geometry, costs, steps=steps, shard_head=shard_head)
        rows.append(comparison_row(timeline(segment, costs), step))
    return rows


def _first_line(text: str) -> str:
    first, *others = text.splitlines()
    return f"{first} (and {len(others)} more)" if others else first


def measured_run(folder: Path) -> tuple[int, RankTimes]:
    """Micro-batches per step of the run in `folder`, and compute times of its ranks, averaged over segments.

    Raises:
        UserError: no segment was measured, or a row is damaged.
    """
    try:
        rows = run_at(folder).rows()
    except RowError as error:
        raise UserError(f"{folder}: metrics.jsonl: {error}") from error
    start = next((row for row in reversed(rows) if isinstance(row, Start)), None)
    segments = [row for row in rows if isinstance(row, Segment)]
    if start is None or not any(row.action_seconds for row in segments):
        raise UserError(f"{folder}: no segment of it was measured (replays are not)")
    if start.rank_of_stage is None or start.microbatches is None:
        lacks = "rank_of_stage" if start.rank_of_stage is None else "microbatches"
        raise UserError(f"{folder}: metrics.jsonl: a row lacks {lacks}")
    times = rank_times(segments, start.rank_of_stage)
    assert times is not None
    return start.microbatches, times


def rank_times(segments: Iterable[Segment], rank_of_stage: Sequence[int]) -> RankTimes | None:
    """Compute times of each rank, averaged over `segment` rows; None if no row has times.

    Args:
        segments: the rows.
        rank_of_stage: rank of each stage.
    """
    measured = [row for row in segments if row.action_seconds]
    if not measured:
        return None
    ranks = len(measured[0].busy)

    def of_op(op: str) -> tuple[float, ...]:
        return _rank_seconds(measured, op, rank_of_stage=rank_of_stage, ranks=ranks)

    # A whole backward counts as two equal halves; a schedule may have whole and split backwards.
    half = [seconds / 2 for seconds in of_op("B")]
    return RankTimes(
        forward=of_op("F"),
        input_half=of_op("I") if not any(half) else tuple(half),
        weight_half=of_op("W") if not any(half) else tuple(half),
        update=of_op("U"),
    )


def _rank_seconds(
    segments: Sequence[Segment], op: str, *, rank_of_stage: Sequence[int], ranks: int
) -> tuple[float, ...]:
    """Mean seconds of one `op` at each rank, summed over the rank's stages."""
    steps = sum(segment.steps for segment in segments)
    total = [0.0] * ranks
    for segment in segments:
        for rank, seconds in zip(rank_of_stage, (segment.action_seconds or {}).get(op, []), strict=False):
            total[rank] += (seconds or 0.0) * segment.steps / steps
    return tuple(total)
