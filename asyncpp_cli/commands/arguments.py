"""Arguments that several commands take: experiments, runs, settings; and options that are a dataclass."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from asyncpp_cli.completion import experiments, run_folders, runs_of_folder, settings

ExperimentOrRun = Annotated[
    Path,
    typer.Argument(
        metavar="DIR[/RUN]",
        help="An experiment, or a run of it by the beginning of its id.",
        autocompletion=experiments,
    ),
]
MoreRuns = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="More runs; default: all of DIR.", autocompletion=runs_of_folder),
]
OneRun = Annotated[
    Path,
    typer.Argument(metavar="DIR/RUN", help="A run, by the beginning of its id.", autocompletion=run_folders),
]
Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings for all cells, as in train.steps=300 or 'matrix.seed=[0,1]'.",
        autocompletion=settings,
    ),
]

AllowCode = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE", help="Modules of your own that the template may name: A,B; can be repeated."
    ),
]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each annotated field of its parameters that are dataclasses."""
    hints = typing.get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    options: list[tuple[str, Any, Any]] = []
    names: dict[str, list[str]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            of_fields = typing.get_type_hints(groups[name], include_extras=True)
            entries = [
                (entry.name, of_fields[entry.name], entry.default)
                for entry in fields(groups[name])
                if typing.get_origin(of_fields[entry.name]) is Annotated
            ]
            options += entries
            names[name] = [option for option, _, _ in entries]
        else:
            options.append((name, hints[name], parameter.default))

    def expanded(**given: Any) -> None:
        for name, group in groups.items():
            assert isinstance(group, type)
            given[name] = group(**{option: given.pop(option) for option in names[name] if option in given})
        command(**given)

    expanded.__doc__, expanded.__name__ = command.__doc__, command.__name__
    expanded.__annotations__ = {name: hint for name, hint, _ in options}
    expanded.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
            for name, hint, default in options
        ]
    )
    return expanded
