"""The source of a user's own schedule, optimizer and model: its files, its hash, and whether it has changed.

Own code is a module that `schedule.name`, `optimizer.name` or `model.factory` names, what it imports from the
folder that it is found in, and so on; of an installed module, from its own package alone. torch, Python's
library and asyncpp are not own code: a run's start row has their versions. Nothing is imported to find the
files, so what a module imports by a computed name is not among them.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from traceback import FrameSummary, extract_tb

from stages.config.limits import ConfigError
from stages.config.run_config import RunConfig

_DIGITS = 16
"""Hexadecimal digits of a hash that are kept: enough to tell versions apart, and short in a table."""

_NOT_OWN = sys.stdlib_module_names | {
    *("torch", "asyncpp", "asyncpp_cli", "stages", "schedules", "optimizers"),
}
_INSTALLED = ("site-packages", "dist-packages")


def named_code(config: RunConfig) -> dict[str, str]:
    """The code that a configuration names, `package.module:name`, by key.

    Raises:
        ConfigError: it is of Python's own library, which has nothing that a run could use and much that acts
            when it is imported or called.
    """
    named = {
        "schedule.name": config.schedule.name,
        "optimizer.name": config.optimizer.name,
        "model.factory": config.model.factory or "",
    }
    named = {key: name for key, name in named.items() if ":" in name}
    for key, name in named.items():
        top = name.partition(".")[0].partition(":")[0]
        if top in sys.stdlib_module_names or _folder_of(top) == Path(os.__file__).absolute().parent:
            raise ConfigError(key, f"{name} is of Python's own library; accepted: code of your own")
    return named


def file_of_module(module: str) -> Path | None:
    """The file of a module, or the folder that its package is in; None if its package is not found."""
    root = _folder_of(module.partition(".")[0])
    return None if root is None else _file_of(module, root) or root


def own_code(config: RunConfig) -> dict[str, dict[str, Path]]:
    """The files of a run's own code by module, for each section of the configuration that names such code.

    Raises:
        ConfigError: as `named_code`.
    """
    modules = {key.partition(".")[0]: name.partition(":")[0] for key, name in named_code(config).items()}
    return {section: files for section, module in modules.items() if (files := _imported(module))}


def code_sha256(files: Mapping[str, Path]) -> str:
    """The first 16 digits of a hash of files by module, the same wherever they are.

    Raises:
        OSError: a file cannot be read.
    """
    lines = (f"{name} {sha256(files[name].read_bytes()).hexdigest()}\n" for name in sorted(files))
    return sha256("".join(lines).encode()).hexdigest()[:_DIGITS]


def check_code(config: RunConfig) -> None:
    """Check that the run's own code is that for which the run was made.

    Raises:
        ConfigError: it has changed.
    """
    found = own_code(config)
    for section in ("schedule", "optimizer", "model"):
        recorded = getattr(config, section).code_sha256
        if recorded is None:
            continue
        files = found.get(section, {})
        if (now := code_sha256(files)) != recorded:
            modules = ", ".join(sorted(files)) or "not found"
            raise ConfigError(
                f"{section}.code_sha256",
                f"own code ({modules}) has changed since the run was made: {recorded}, now {now}; restore it "
                "from code/ in the run's folder, or sweep into another folder",
            )


def raised_in(error: BaseException | None, config: RunConfig) -> tuple[list[FrameSummary], str]:
    """Where an error, or the first that it came from, was raised in a run's own code.

    Returns:
        Its frames from the first in own code on, and ` (FILE, line N)` of the innermost one in own code, for
        messages; both empty if it came through none.
    """
    own = {file for files in own_code(config).values() for file in files.values()}
    while error is not None:
        frames = extract_tb(error.__traceback__)
        inside = [number for number, frame in enumerate(frames) if Path(frame.filename).absolute() in own]
        if inside:
            innermost = frames[inside[-1]]
            return frames[inside[0] :], f" ({innermost.filename}, line {innermost.lineno})"
        error = error.__cause__
    return [], ""


def _imported(module: str) -> dict[str, Path]:
    """The files of a module, of its packages, and of what they import from the same place, by module."""
    top = module.partition(".")[0]
    files: dict[str, Path] = {}
    waiting = [module]
    root = None if top in _NOT_OWN else _folder_of(top)
    while waiting and root is not None:
        name = waiting.pop()
        parts = name.split(".")
        if parts[0] in _NOT_OWN or (root.name in _INSTALLED and parts[0] != top):
            continue
        # Importing a.b.c runs a and a.b first.
        for length in range(1, len(parts) + 1):
            parent = ".".join(parts[:length])
            file = None if parent in files else _file_of(parent, root)
            if file is not None:
                files[parent] = file
                waiting += _names_imported(parent, file)
    return files


def _folder_of(top: str) -> Path | None:
    """The folder that a top-level module is found in; None if it is not found."""
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).absolute().parent
    return Path(spec.origin).absolute().parent if spec.has_location and spec.origin else None


def _file_of(module: str, root: Path) -> Path | None:
    base = root.joinpath(*module.split("."))
    candidates = [
        base / "__init__.py",
        *(base.with_name(base.name + end) for end in (".py", *EXTENSION_SUFFIXES)),
    ]
    return next((file for file in candidates if file.is_file()), None)


def names_defined(module: str) -> set[str] | None:
    """The names in a module of Python code, without importing it; None if it may have others."""
    file = file_of_module(module)
    tree = None if file is None else _parsed(file)
    if tree is None:
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
    return None if names & {"*", "__getattr__", "globals", "setattr", "exec"} else names


def _parsed(file: Path) -> ast.Module | None:
    """The code of a file; None if it is no valid Python."""
    if file.suffix != ".py":
        return None
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return None


def _names_imported(module: str, file: Path) -> Iterator[str]:
    """The names that a module imports, each perhaps a module; none of what is not valid Python."""
    tree = _parsed(file)
    if tree is None:
        return
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from filter(None, [base, *(f"{base}.{alias.name}" for alias in node.names if base)])
