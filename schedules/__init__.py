"""Pipeline schedules as programs: built, verified, analyzed, simulated and drawn without torch.

    from schedules import analyze, build, verify

    program = build("2bw", stages=4, microbatches=8, steps=3)
    verify(program)
    print(analyze(program).delay_max)

Actions of a program: `schedules.actions`. What stages send each other: `schedules.messages`.
"""

from schedules.actions import NO_MICROBATCH, Action, Op, Program, parse_action
from schedules.analyze import Analysis, analyze
from schedules.errors import ScheduleError
from schedules.family import FAMILY, NAMES, Schedule, build, find, is_synchronous
from schedules.two_bw import smallest_delay
from schedules.verify import find_problems, verify

__all__ = [
    "FAMILY",
    "NAMES",
    "NO_MICROBATCH",
    "Action",
    "Analysis",
    "Op",
    "Program",
    "Schedule",
    "ScheduleError",
    "analyze",
    "build",
    "find",
    "find_problems",
    "is_synchronous",
    "parse_action",
    "smallest_delay",
    "verify",
]
