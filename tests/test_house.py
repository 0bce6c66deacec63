"""The house itself: who imports whom, and documents that name only what is there."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import shlex
import tomllib
import warnings
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from support.files import ROOT

from asyncpp_cli.main import click_command

MAY_IMPORT = {
    "schedules": set(),
    "optimizers": set(),
    "stages": {"schedules", "optimizers"},
    "asyncpp": {"asyncpp_cli"},
    "asyncpp_cli": {"schedules", "optimizers", "stages", "asyncpp"},
}
"""The packages of ours that each package may import, beside itself."""

TORCH_FREE = (
    "schedules",
    "asyncpp_cli",
    "stages/__init__.py",
    "stages/config/__init__.py",
    "stages/config/keys.py",
    "stages/config/limits.py",
    "stages/config/records.py",
    "stages/config/run_config.py",
    "stages/config/segments.py",
    "stages/weights/gradient_buffers.py",
    "stages/resolve",
    "stages/checkpoint/files.py",
    "stages/checkpoint/initial_weights.py",
    "stages/shape",
    "stages/update/lr_schedule.py",
    "optimizers/__init__.py",
    "optimizers/catalogue.py",
    "optimizers/options.py",
)
"""Files and folders that import no torch when they are imported: the command line starts with them."""

DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


command_line = functools.cache(click_command)  # to build it takes longer than most commands


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
OVER_NO_NETWORK = {"stages/comm/sharding.py uses init_process_group"}
"""torch's `fully_shard` asks for a group of the whole world: it is of a store within the process."""


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_nothing_is_unpickled(package: str) -> None:
    wrong = set()
    for file in python_files(package):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
        found = set(imported(tree)) & UNPICKLING
        # Collectives of objects unpickle what they receive; torch's store takes it from anybody.
        found |= {name for name in names if re.search(r"_object(_list)?$", name)} - {"is_object"}
        found |= names & {"TCPStore", "init_process_group", "new_group"}
        wrong |= {f"{file.relative_to(ROOT)} uses {name}" for name in found}
    assert wrong <= OVER_NO_NETWORK


def imports_between_files() -> dict[str, set[str]]:
    """The modules of ours that each module imports; imports in functions and for type checking count, too."""
    files = {}
    for file in (file for package in MAY_IMPORT for file in python_files(package)):
        parts = file.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph: dict[str, set[str]] = {}
    for name, file in files.items():
        found = graph.setdefault(name, set())
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {member if member in files else node.module for member in members}
        found &= files.keys()
        found.discard(name)
    return graph


def test_no_files_and_no_folders_import_each_other() -> None:
    graph = imports_between_files()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
    folders = {
        (importer.rpartition(".")[0], imported.rpartition(".")[0])
        for importer, names in graph.items()
        for imported in names
        # What a package's face hands on is its children's.
        if "." in importer and "." in imported
    }
    # A catalogue lists its folder's files, which are written in terms of the package.
    faces = {("schedules", "schedules.library"), ("optimizers", "optimizers.rules")}
    mutual = {pair for pair in folders if pair[::-1] in folders and pair[0] < pair[1]}
    assert mutual == faces


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of a syntax tree, those behind fields and constants among them."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def test_docstrings_stand_alone() -> None:
    """They name what they are about; one that begins so is understood only with the line before."""
    leaning = [
        f"{file.relative_to(ROOT)}:{line}"
        for package in MAY_IMPORT
        for file in python_files(package)
        for line, text in docstrings(ast.parse(file.read_text(encoding="utf-8")))
        if re.match(r"\s*(Of|As|Likewise|The same|See)\b", text)
    ]
    assert leaning == []


LONGEST, MOST_PARAMETERS = 80, 10


def command_functions(command: Any) -> Iterator[str]:
    """Names of the functions behind a Click command and those below it."""
    if hasattr(command, "commands"):
        for each in command.commands.values():
            yield from command_functions(each)
    else:
        yield command.callback.__name__


def test_functions_are_short_and_take_few_parameters() -> None:
    # Typer makes an option of each parameter of a command's function.
    of_typer = set(command_functions(command_line()))
    wrong = []
    for file in (file for package in MAY_IMPORT for file in python_files(package)):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            parameters = [each for each in given if each.arg not in ("self", "cls")]
            lines = node.end_lineno - node.lineno + 1 if node.end_lineno is not None else 0
            if lines > LONGEST:
                wrong.append(f"{module}.{node.name} has {lines} lines")
            is_command = module.startswith("asyncpp_cli.commands.") and node.name in of_typer
            if len(parameters) > MOST_PARAMETERS and not is_command:
                wrong.append(f"{module}.{node.name} has {len(parameters)} parameters")
    assert wrong == []


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
    assert re.findall(r"^\| `([\w.]+)` \|.*\|  \|$", text, flags=re.MULTILINE) == []  # every key is explained


def code_lines(document: Path) -> Iterator[str]:
    """The lines of a document's shell blocks: fenced as sh, or typed at a `$`, or indented."""
    text = document.read_text(encoding="utf-8")
    for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"^(?:    |\$ )(asyncpp .*)$", text, flags=re.MULTILINE)


def set_up_commands() -> list[str]:
    return [line for line in code_lines(ROOT / "README.md") if "pip install" in line]


def test_readme_has_at_most_120_lines() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_readme_has_exactly_two_set_up_commands() -> None:
    run, test = set_up_commands()
    assert run == "pip install . && asyncpp quickstart"
    assert test.startswith("pip install ")
    assert test.endswith(' && python -m pytest -n 3 -m "not slow and not slurm and not gpu and not browser"')


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
        for part in line.partition("#")[0].partition(" > ")[0].strip().split(" && ")
        if part.startswith("asyncpp ") and "[--" not in part
    ]


def named_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that a line names, and the words after it."""
    command, rest = command_line(), words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"asyncpp has no command {rest[0]}"
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


@pytest.mark.parametrize(("document", "line"), documented_commands())
def test_documented_commands_are_accepted_by_the_parser(document: str, line: str) -> None:
    command, rest = named_command(shlex.split(line))
    command.make_context(command.name, rest)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_within_sentences_exist_with_their_options(document: Path) -> None:
    for mention in re.findall(r"(?<!`)`(asyncpp [a-z-][^`]*)`", document.read_text(encoding="utf-8")):
        command, rest = named_command(mention.split())
        accepted = {"--help"}.union(*(option.opts for option in command.params))
        wrong = [word for word in rest if word.startswith("--") and word.partition("=")[0] not in accepted]
        assert wrong == [], mention


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_documents_name_exist(document: Path) -> None:
    if document.name == "CHANGELOG.md":
        return  # tells what was
    folders = "asyncpp_cli|stages|schedules|optimizers|templates|tests|benchmarks|docs"
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", document.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_test_modules_have_names_of_their_own() -> None:
    """pytest imports them by their names alone: the second of a name is not run."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_all_say_the_same_of_python() -> None:
    """The versions that are tested are those that are claimed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    first, last = claimed[0], claimed[-1]
    assert project["requires-python"] == f">={first},<3.{int(last.removeprefix('3.')) + 1}"
    workflow = (ROOT / ".github" / "workflows" / "checks.yml").read_text()
    assert re.findall(r'\{python: "(.*?)"', workflow) == claimed
    assert f"Python {', '.join(claimed[:-1])} or {last}" in (ROOT / "README.md").read_text()
    assert f"for Python {first} to {last}" in " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    written = {
        folder.name.split("-")[1] for folder in (ROOT / "tests/support/saved_by").iterdir() if folder.is_dir()
    }
    assert written >= set(claimed)


def test_the_layers_that_are_drawn_are_those_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    towers = [
        next(contract["layers"] for contract in contracts if contract.get("containers") == [package])
        for package in ("asyncpp_cli", "stages")
    ]
    drawn = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("<!-- layers -->")[2]
    lines = drawn.partition("```text\n")[2].partition("\nbelow")[0].splitlines()[1:]
    left, right = (
        [column.strip() for column in columns]
        for columns in zip(*((line[:39], line[39:]) for line in lines), strict=True)
    )
    assert list(filter(None, left)) == [layer for layer in towers[0] if layer != "__main__"]
    assert list(filter(None, right)) == towers[1]


def test_what_torch_warns_of_in_its_own_modules_fails_no_test() -> None:
    for category in (DeprecationWarning, UserWarning):
        warnings.warn_explicit("old", category, "x.py", 1, module="torch.jit._script")
        with pytest.raises(category):
            warnings.warn_explicit("old", category, "x.py", 2, module="stages.trainer")
