"""The house itself: who imports whom, and documents that name only what is there."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "schedules": set(),
    "optimizers": set(),
    "stages": {"schedules", "optimizers"},
    "asyncpp_cli": {"schedules", "optimizers", "stages"},
}
"""The packages of ours that each package may import, beside itself."""

TORCH_FREE = (
    "schedules",
    "asyncpp_cli",
    "stages/__init__.py",
    "stages/config.py",
    "stages/buffers.py",
    "stages/check.py",
    "stages/initial_weights.py",
    "stages/llama_layout.py",
    "stages/programs.py",
    "optimizers/__init__.py",
    "optimizers/catalogue.py",
)
"""Files and folders that import no torch when they are imported: the command line starts with them."""

DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def python_files(where: str) -> list[Path]:
    path = ROOT / where
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def imported(tree: ast.AST) -> Iterator[str]:
    """The top-level names that a syntax tree imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.partition(".")[0]


def imported_at_start(file: Path) -> set[str]:
    """The names that a module imports when it is itself imported: not those inside of functions."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    outside = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    # `if TYPE_CHECKING:` is for the type checker alone.
    running = [
        node for node in outside if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    return {name for node in running for name in imported(node)}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_what_their_contract_allows(package: str) -> None:
    ours = set(MAY_IMPORT)
    wrong = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in python_files(package)
        for name in imported(ast.parse(file.read_text(encoding="utf-8")))
        if name in ours and name not in MAY_IMPORT[package] | {package}
    }
    assert wrong == set()


@pytest.mark.parametrize("where", TORCH_FREE)
def test_files_of_the_command_line_import_no_torch(where: str) -> None:
    wrong = [str(file) for file in python_files(where) if "torch" in imported_at_start(file)]
    assert wrong == []


UNPICKLING = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_nothing_is_unpickled(package: str) -> None:
    """The reader of checkpoints has an unpickler that makes nothing but what such a file holds."""
    wrong = set()
    for file in python_files(package):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
        found = set(imported(tree)) & UNPICKLING
        # Collectives of objects unpickle what they receive; torch's store takes it from anybody.
        found |= {name for name in names if re.search(r"_object(_list)?$", name)} - {"is_object"}
        found |= names & {"TCPStore", "init_process_group", "new_group"}
        if file.relative_to(ROOT) == Path("stages/checkpoint_reader.py"):
            found -= {"pickle"}
        wrong |= {f"{file.relative_to(ROOT)} uses {name}" for name in found}
    assert wrong == set()


def links(document: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    yield from re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    inside = [link for link in links(document) if "://" not in link]
    broken = [link for link in inside if not (document.parent / link.partition("#")[0]).exists()]
    assert broken == []


def test_the_reference_of_configuration_keys_is_current() -> None:
    spec = importlib.util.spec_from_file_location("made", ROOT / "docs" / "make_configuration.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    text = made.FILE.read_text(encoding="utf-8")
    assert text == made.text(), "run: make docs"
    # Every field says what it is, but for those whose name does.
    unexplained = re.findall(r"^\| `([\w.]+)` \|.*\|  \|$", text, flags=re.MULTILINE)
    assert set(unexplained) <= SAID_BY_THEIR_NAMES


SAID_BY_THEIR_NAMES = {
    *(f"model.{name}" for name in ("layers", "width", "heads", "vocab_size", "rope_base", "norm_eps")),
    "train.clip_norm",
}


def code_lines(document: Path) -> Iterator[str]:
    """The lines of a document's shell blocks (fenced as sh, or indented) without their comments."""
    text = document.read_text(encoding="utf-8")
    for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL):
        yield from block.splitlines()
    yield from re.findall(r"^    (asyncpp .*)$", text, flags=re.MULTILINE)


def set_up_commands() -> list[str]:
    return [line for line in code_lines(ROOT / "README.md") if "pip install" in line]


def test_readme_has_exactly_two_set_up_commands() -> None:
    run, test = set_up_commands()
    assert run == "pip install . && asyncpp quickstart"
    assert test.startswith("pip install ")
    assert test.endswith(" && python -m pytest -n 2")


def test_continuous_integration_finds_the_test_command() -> None:
    """`.ci/run` takes the line after the marker and the fence."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [found] = re.findall(r"^<!-- set-up: tests -->\n```sh\n(.*)\n```$", text, flags=re.MULTILINE)
    assert found == set_up_commands()[1]
    assert "<!-- set-up: tests -->" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def documented_commands() -> list[tuple[str, str]]:
    return [
        (str(document.relative_to(ROOT)), part)
        for document in DOCUMENTS
        for line in code_lines(document)
        for part in line.partition("#")[0].strip().split(" && ")
        if part.startswith("asyncpp ") and "[--" not in part
    ]


@pytest.mark.parametrize(("document", "line"), documented_commands())
def test_documented_commands_are_accepted_by_the_parser(document: str, line: str) -> None:
    from asyncpp_cli.main import app

    command: Any = typer.main.get_command(app)
    name, *arguments = shlex.split(line)
    while hasattr(command, "commands"):
        name = arguments.pop(0)
        assert name in command.commands, f"{document} has a command {name} that asyncpp has not"
        command = command.commands[name]
    command.make_context(name, arguments)
