"""What a person asks of `asyncpp schedule`: programs by name or from a file, and costs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncpp_cli.errors import UserError
from asyncpp_cli.schedule_output import comparison_row
from schedules import FAMILY, Program, ScheduleError, build, find_problems, smallest_delay
from schedules.costs import Costs, RankTimes, uniform_costs, with_measured_ranks
from schedules.program_file import from_text
from schedules.simulate import Timeline, simulate, steps_to_measure
from schedules.torch_lists import from_csv


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The numbers that a schedule of the family is built from."""

    stages: int | None = None
    microbatches: int | None = None
    chunks: int | None = None
    ahead: int | None = None
    delay: int | None = None
    update_interval: int | None = None


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """Times as asked for, in one unit."""

    forward: float = 1.0
    backward: float = 2.0
    input_half: float | None = None
    weight_half: float | None = None
    update: float = 0.0
    reduction: float = 0.0
    norm: float | None = None
    latency: float = 0.0
    transfer: float = 0.0
    jitter: float = 0.0
    seed: int = 0
    measured: RankTimes | None = None
    """Computing times of every rank; None: as forward, backward and update say."""

    def of(self, program: Program) -> Costs:
        """The costs of `program`."""
        times = {name: value for name, value in vars(self).items() if name != "measured"}
        try:
            costs = uniform_costs(program, **times)
            return costs if self.measured is None else with_measured_ranks(costs, program, self.measured)
        except ScheduleError as error:
            raise UserError(str(error)) from error


def is_file(name: str) -> bool:
    """Whether `name` is meant as a file: it is no schedule's name, and looks like a path or is one."""
    return name not in FAMILY and ("/" in name or "." in name or Path(name).is_file())


def read_program(file: Path, *, steps: int) -> Program:
    """The program in a program file (unchecked), or of a CSV of torch's form (`steps` times)."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: is not text") from error
    try:
        if file.suffix == ".csv":
            return from_csv(text, name=str(file), steps=steps)
        return from_text(text, file=str(file))
    except ScheduleError as error:
        raise UserError(_first_line(str(error))) from error


def program(name: str, geometry: Geometry, *, steps: int, first_step: int = 0) -> Program:
    """The right program called `name`: of the family, or from a file, which may have its own steps."""
    if is_file(name):
        found = read_program(Path(name), steps=steps)
        problems = find_problems(found)
        if problems:
            raise UserError(f"{name}: {_first_line(chr(10).join(problems))} (see: asyncpp schedule check)")
        return found
    try:
        if name not in FAMILY:
            build(name, stages=1, microbatches=1, steps=1)
        for option, value in (("--stages", geometry.stages), ("--microbatches", geometry.microbatches)):
            if value is None:
                raise UserError(
                    f"{option} is missing: {name} is built from the numbers of stages and micro-batches"
                )
        return build(name, steps=steps, first_step=first_step, **_taken(name, geometry))
    except ScheduleError as error:
        raise UserError(str(error)) from error


def _taken(name: str, geometry: Geometry) -> dict[str, Any]:
    """What schedule `name` takes of the geometry; what only others take is for them, as in a comparison."""
    schedule = FAMILY[name]
    taken: dict[str, Any] = {"stages": geometry.stages, "microbatches": geometry.microbatches}
    if schedule.takes_chunks:
        taken["chunks"] = 2 if geometry.chunks is None else geometry.chunks
    if schedule.takes_delay:
        taken["delay"] = geometry.delay
    if schedule.takes_ahead:
        taken["ahead"] = 1 if geometry.ahead is None else geometry.ahead
    if schedule.default_interval is not None:
        taken["update_interval"] = geometry.update_interval
    return taken


def note_delay(names: Sequence[str], geometry: Geometry) -> None:
    """Say so where 2bw cannot have a delay of 1."""
    if "2bw" not in names or geometry.delay is not None:
        return
    stages, microbatches, ahead = geometry.stages or 1, geometry.microbatches or 1, geometry.ahead or 1
    delay = smallest_delay(stages=stages, microbatches=microbatches, ahead=ahead)
    if delay > 1:
        print(
            f"2bw: a delay of 1 needs {ahead * (stages - 1)} micro-batches a step on {stages} stages; "
            f"the smallest delay with {microbatches} is {delay}, which is taken",
            file=sys.stderr,
        )


def refuse_untaken(names: Sequence[str], geometry: Geometry) -> None:
    """Refuse an option that none of the schedules takes: it would be passed over in silence."""
    schedules = [FAMILY[name] for name in names if name in FAMILY]
    for option, value, is_taken in (
        ("--chunks", geometry.chunks, any(schedule.takes_chunks for schedule in schedules)),
        ("--ahead", geometry.ahead, any(schedule.takes_ahead for schedule in schedules)),
        ("--delay", geometry.delay, any(schedule.takes_delay for schedule in schedules)),
        (
            "--update-interval",
            geometry.update_interval,
            any(schedule.default_interval is not None for schedule in schedules),
        ),
    ):
        if schedules and value is not None and not is_taken:
            raise UserError(f"{option} {value}: not an option of {', '.join(names)}")


def measurable_program(name: str, geometry: Geometry, *, steps: int | None, jitter: float) -> Program:
    """As `program`, over as many steps as it takes to see it run evenly (or as `steps` says)."""
    one = program(name, geometry, steps=1)
    if steps is None:
        ahead = 1 if geometry.ahead is None else geometry.ahead
        steps = steps_to_measure(stages=one.num_stages, microbatches=one.microbatches, ahead=ahead)
        steps += 0 if geometry.delay is None else geometry.delay
        # Chance needs more of them: some hundreds of micro-batches.
        steps += -(-256 // one.microbatches) if jitter else 0
    return program(name, geometry, steps=steps)


def timeline(of: Program, costs: CostOptions) -> Timeline:
    """`of` played through."""
    return simulate(of, costs.of(of))


def comparison(
    names: Sequence[str], geometry: Geometry, costs: CostOptions, *, steps: int | None = None
) -> list[dict[str, Any]]:
    """What `compare` says of each of the schedules called `names`."""
    rows = []
    for name in names:
        played = timeline(measurable_program(name, geometry, steps=steps, jitter=costs.jitter), costs)
        try:
            rows.append(comparison_row(played))
        except ValueError as error:
            mend = "; write the file with more (schedule import --steps N)" if is_file(name) else ""
            raise UserError(f"{name}: {error}{mend}") from error
    return rows


def transfer_time(size: float, bandwidth: float | None) -> float:
    """How long a message of `size` occupies its channel."""
    if bandwidth is None:
        return 0.0
    if bandwidth <= 0:
        raise UserError(f"--bandwidth {bandwidth}: accepted: more than 0")
    return size / bandwidth


def _first_line(text: str) -> str:
    first, *others = text.splitlines()
    return f"{first} (and {len(others)} more)" if others else first
