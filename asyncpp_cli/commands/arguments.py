"""Arguments that several commands take: experiments, runs, settings; and options that are a dataclass."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


def template_words(incomplete: str) -> list[str]:
    """Names of shipped experiments and models, for the shell's completion."""
    from asyncpp_cli.experiment.shipped import template_names

    names = [*template_names("experiments"), *template_names("models")]
    return [name for name in names if name.startswith(incomplete)]


def run_words(incomplete: str) -> list[str]:
    """Runs, DIR/ID, for the shell's completion; it completes folders by itself."""
    from asyncpp_cli.base.errors import UserError
    from asyncpp_cli.runs.experiment_folder import open_experiment

    folder, _, begun = incomplete.rpartition("/")
    try:
        ids = [cell.id for cell in open_experiment(Path(folder)).cells] if folder else []
    except (UserError, OSError):
        return []
    return [f"{folder}/{name}" for name in ids if name.startswith(begun)]


ExperimentOrRun = Annotated[
    Path,
    typer.Argument(
        metavar="DIR[/RUN]",
        help="An experiment, or a run of it by the beginning of its id.",
    ),
]
MoreRuns = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="More runs; default: all of DIR."),
]
OneRun = Annotated[
    Path,
    typer.Argument(metavar="DIR/RUN", help="A run, by the beginning of its id.", autocompletion=run_words),
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings for all cells, as in train.steps=300 or 'matrix.seed=[0,1]'.",
    ),
]

AllowCode = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE", help="Modules of your own that the template may name: A,B; can be repeated."
    ),
]


REQUIRED = inspect.Parameter.empty


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each annotated field of its parameters that are dataclasses.

    Options that a caller in Python leaves out have their defaults.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    options_of = {name: _options(group) for name, group in groups.items()}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        parameters += options_of[name] if name in groups else [_option(name, parameter.default, hints[name])]

    def expanded(**given: Any) -> None:
        for name, group in groups.items():
            own = {each.name: given.pop(each.name) for each in options_of[name] if each.name in given}
            given[name] = group(**own)
        command(**given)

    expanded.__doc__, expanded.__name__ = command.__doc__, command.__name__
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return expanded


def _options(group: Any) -> list[inspect.Parameter]:
    """The annotated fields of a dataclass, as parameters of a command."""
    hints = typing.get_type_hints(group, include_extras=True)
    return [
        _option(field.name, REQUIRED if field.default is MISSING else field.default, hints[field.name])
        for field in fields(group)
        if typing.get_origin(hints[field.name]) is Annotated
    ]


def _option(name: str, default: Any, hint: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
