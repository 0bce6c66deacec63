"""The command line starts without what is slow to import."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from support.command_line import ASYNCPP, ran, refusal
from support.launches import sweep

from asyncpp_cli.base.console import finite
from asyncpp_cli.base.version import asyncpp_version
from asyncpp_cli.main import app
from optimizers import NAMES

SLOW = {
    *("torch", "submitit", "polars", "matplotlib", "pytorch_optimizer"),
    *("tensorboard", "wandb", "tokenizers", "zstandard"),
}

ASK = """
import contextlib, io, json, sys
from asyncpp_cli.main import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["asyncpp", *arguments]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code, output.getvalue(), sorted(sys.modules)]))
"""


def commands_of(app: typer.Typer, before: str = "") -> Iterator[tuple[str, Callable[..., object] | None]]:
    """Words and function of every command; groups have no function."""
    yield before, None
    for group in app.registered_groups:
        yield from commands_of(group.typer_instance, f"{before} {group.name}".strip())
    for command in app.registered_commands:
        yield f"{before} {command.name or command.callback.__name__}".strip(), command.callback


COMMANDS = dict(commands_of(app))


def after_each(commands: Sequence[Sequence[str]], *options: str) -> list[tuple[int, str, set[str]]]:
    """Exit code and output of each command, run one after the other in a process with these options of
    Python, and the modules then imported."""
    asked = ran(sys.executable, *options, "-c", ASK, json.dumps(commands))
    assert asked.code == 0, asked.errors
    ends: list[Any] = [json.loads(line) for line in asked.output.splitlines()]
    return [(code, output, set(modules)) for code, output, modules in ends]


@pytest.fixture(scope="module")
def helped() -> dict[str, tuple[int, str, set[str]]]:
    """`--help` of every command, by the command."""
    ends = after_each([[*command.split(), "--help"] for command in COMMANDS])
    return dict(zip(COMMANDS, ends, strict=True))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_slow(command: str, helped: dict[str, tuple[int, str, set[str]]]) -> None:
    code, output, modules = helped[command]
    assert code == 0
    assert output.startswith("Usage:")
    assert not {*SLOW, "omegaconf", "numpy", "schedules", "optimizers", "stages.config.run_config"} & modules
    assert not re.search(r"^  [^-\s].* <(list|str|path)", output, re.MULTILINE)


def test_the_first_list_has_what_users_type(helped: dict[str, tuple[int, str, set[str]]]) -> None:
    _, output, _ = helped[""]
    listed = re.findall(r"^  (\w+)  +[A-Z]", output.partition("Commands:")[2], re.MULTILINE)
    assert {"launch", "plan", "templates", "theory"} < set(listed)
    assert "train" not in listed


# The first sweep may have to split the text, with numpy. The planner is for cells with a limit of memory.
IMPORTS = {
    "sweep quickstart --out e": {*SLOW, "asyncpp_cli.planner.estimate"},
    "sweep quickstart --out ./e": {*SLOW, "asyncpp_cli.planner.estimate", "numpy"},
    "status e": {*SLOW, "numpy", "omegaconf"},
    "report e --format json": {"torch", "matplotlib"},
    "schedule compare 2bw 1f1b --stages 4 --microbatches 4": {"torch", "matplotlib"},
}
"""By command, in a process of its own, what it does not import."""


@pytest.mark.slow
def test_a_command_imports_nothing_slow_that_it_does_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command, slow in IMPORTS.items():
        [(code, _, modules)] = after_each([command.split()])
        assert (command, code, slow & modules) == (command, 0, set())


@pytest.mark.slow
def test_a_run_that_is_not_compiled_does_not_import_the_compiler(tmp_path: Path) -> None:
    """torch imports it with an optimizer of its own and with the first values of an embedding, and sympy with
    the first gradient that a backward is given: seconds in every process."""
    matrix = f"matrix={{schedule: 2bw, optimizer: [{', '.join(NAMES)}]}}"
    changes = [matrix, "exclude=[]", "train.steps=2", "site.device=cpu", "optimizer.lr=1e-3"]
    runs = sweep(tmp_path / "e", *changes, "train.checkpoint_interval=1").runs
    assert len(runs) == len(NAMES)
    for code, _, modules in after_each([["train", str(run.folder), "--replay"] for run in runs]):
        assert code == 0
        assert not {"torch._dynamo", "torch._inductor", "sympy"} & modules


def test_the_version_is_that_of_the_package() -> None:
    assert ran(*ASYNCPP, "--version").output == f"asyncpp {asyncpp_version()}\n"


def options_that_take_numbers() -> Iterator[tuple[str, Any]]:
    """Name and parser of every option whose value is a float, of all commands."""
    for name, function in COMMANDS.items():
        parameters = inspect.signature(function, eval_str=True).parameters if function else {}
        for parameter in parameters.values():
            kind, *details = get_args(parameter.annotation) or [None]
            if kind is float or float in get_args(kind):
                yield f"{name} {parameter.name}", details[0].parser


def test_every_option_that_takes_a_number_refuses_infinity_and_nan() -> None:
    parsers = dict(options_that_take_numbers())
    assert len(parsers) > 15
    assert set(parsers.values()) == {finite}, parsers
    for text in ("nan", "inf", "-inf", "1e999", "ten"):
        assert f"--forward: '{text}', accepted: a finite number" in refusal(
            "schedule", "draw", "1f1b", "--stages", "2", "--forward", text, "--out", "x.svg"
        )
