"""Pipeline schedules as programs: built, verified, analyzed, simulated and drawn without torch.

    from schedules import analyze, build, verify

    program = build("2bw", stages=4, microbatches=8, steps=3)
    verify(program)
    print(analyze(program).delay_max)

Actions of a program: `schedules.actions`. What stages send each other: `schedules.messages`.
"""

from schedules.actions import NO_MICROBATCH, Action, Op, Program, ScheduleError, parse_action
from schedules.analyze import Analysis, analyze
from schedules.catalogue import (
    FAMILY,
    KNOWN,
    NAMES,
    build,
    find,
    is_synchronous,
    options_taken,
    smallest_delay,
)
from schedules.custom import is_custom
from schedules.options import OPTIONS
from schedules.schedule import Schedule
from schedules.segment import Segment
from schedules.verify import find_problems, verify

__all__ = [
    "FAMILY",
    "KNOWN",
    "NAMES",
    "NO_MICROBATCH",
    "OPTIONS",
    "Action",
    "Analysis",
    "Op",
    "Program",
    "Schedule",
    "ScheduleError",
    "Segment",
    "analyze",
    "build",
    "find",
    "find_problems",
    "is_custom",
    "is_synchronous",
    "options_taken",
    "parse_action",
    "smallest_delay",
    "verify",
]
