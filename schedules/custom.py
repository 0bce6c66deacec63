"""A custom schedule: `package.module:function` names a function from a segment to a program.

    def my_schedule(segment: Segment, *, delay: int = 1) -> Program: ...

It may take any of `schedules.OPTIONS`, and `delayed_from`, by keyword (see `schedules.build`). It is called
once for every segment of a run, and what it returns is verified each time.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from schedules.actions import Program, ScheduleError
from schedules.segment import Segment
from schedules.verify import find_problems


def is_custom(name: str) -> bool:
    """Whether `name` names a custom function."""
    return ":" in name


def custom_function(name: str) -> Callable[..., Program]:
    """The function that `name` names.

    Raises:
        ScheduleError: The name has another form, or cannot be imported.
    """
    module, _, attribute = name.partition(":")
    if not attribute.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ScheduleError(f"{name!r} does not name a function; accepted: package.module:function")
    try:
        function: Callable[..., Program] = _imported(module, attribute)
    except (Exception, SystemExit) as error:
        raise ScheduleError(
            f"{name} cannot be imported ({_described(error)}); install it, or name its folder in PYTHONPATH"
        ) from error
    if not callable(function):
        raise ScheduleError(f"{name} is not a function")
    return function


def _imported(module_name: str, attribute: str) -> Any:
    """The object that a module has under this name, as `optimizers.named.import_named` finds it, which this
    package does not import."""
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Not for a module that the custom one imports.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        package, _, missing = error.name.rpartition(".")
        path = getattr(importlib.import_module(package), "__path__", ()) if package else None
        names = [each.name for each in pkgutil.iter_modules(path)]
        near = difflib.get_close_matches(missing, names, n=1, cutoff=0.7)
        near = [".".join(filter(None, (package, name))) for name in near]
        raise ModuleNotFoundError(f"no module {error.name!r}{_meant(near)}") from None
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        raise AttributeError(f"{module_name} has no {attribute!r}{_meant(near)}")
    return getattr(module, attribute)


def _meant(near: list[str]) -> str:
    return f"; did you mean {near[0]}?" if near else ""


def custom_program(name: str, segment: Segment, options: Mapping[str, Any]) -> Program:
    """The program that the function returns for `segment`, verified.

    Raises:
        ScheduleError: The function fails, or its program is wrong; the message has a line for each problem.
    """
    try:
        program = custom_function(name)(segment, **options)
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ScheduleError(f"{name} fails for {segment} ({_described(error)})") from error
    if not isinstance(program, Program):
        raise ScheduleError(f"{name} returns {type(program).__name__}, must return a schedules.Program")
    problems = [*_mismatches(program, segment)] or find_problems(program)
    if problems:
        raise ScheduleError("\n".join(f"{name}: {problem}" for problem in problems))
    return program


def _mismatches(program: Program, segment: Segment) -> list[str]:
    """Where `program` is for another segment."""
    return [
        f"the program's {what} is {actual}, must be {wanted}"
        for what, actual, wanted in (
            ("number of ranks", program.num_ranks, segment.ranks),
            ("microbatches", program.microbatches, segment.microbatches),
            ("steps", program.steps, segment.steps),
            ("first_step", program.first_step, segment.first_step),
        )
        if actual != wanted
    ]


def _described(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
