"""Arguments that several commands take: experiments, runs, settings; and options that are a dataclass."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
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
