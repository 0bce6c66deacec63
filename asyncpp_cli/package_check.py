"""Protects asyncpp's packages with common names (`stages`, `schedules`, `optimizers`) from name clashes.

`python -m` searches the working folder first, which may hold a user's own `optimizers`: our packages are
imported from beside this one instead. Another distribution may install a package of the same name over ours:
that is reported, with the repair.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
"""The folder of our packages."""

IMPORTED = ("stages", "schedules", "optimizers")
"""Packages that `asyncpp_cli` imports."""


class _Finder(MetaPathFinder):
    """Finds our packages beside this one, whatever `sys.path` holds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or fullname not in IMPORTED:
            return None
        spec = PathFinder.find_spec(fullname, [str(ROOT)])
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"asyncpp's package {fullname} is not in {ROOT}", name=fullname)
        return spec


def find_our_own() -> None:
    """Import our packages from beside this one from now on.

    Raises:
        ImportError: another package of the same name has already been imported.
    """
    for name in IMPORTED:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and not Path(file).resolve().is_relative_to(ROOT):
            raise ImportError(
                f"asyncpp has a package {name}, and {file} was imported by that name", name=name
            )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


@functools.cache
def changed_files() -> tuple[str, ...]:
    """Our files that were changed or removed since installation; none in a checkout."""
    return tuple(name for name, digest in _installed() if _digest(ROOT / name) != digest)


def what_happened() -> str | None:
    """Damage to our packages since installation, and how to repair it; None if there is none.

    A changed file counts only if another distribution claims it: the user may have edited ours.
    """
    changed = changed_files()
    if not changed:
        return None
    others = _claimants(changed)
    missing = [name for name in changed if not (ROOT / name).is_file()]
    if not others and not missing:
        return None
    reinstall = f"pip install --force-reinstall --no-deps {_source()}"
    if others:
        names = ", ".join(others)
        return (
            f"{ROOT / changed[0]} is no longer asyncpp's: {names} installed a package of that name "
            f"over it. They cannot share an environment; to repair it: pip uninstall {names} && {reinstall}"
        )
    return (
        f"{ROOT / missing[0]} is missing, as after removing another distribution with a package of that "
        f"name; to repair it: {reinstall}"
    )


def _installed() -> Iterator[tuple[str, str]]:
    """Our Python files with their digests, from the installation's RECORD."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        installed = distribution("asyncpp")
    except PackageNotFoundError:
        return
    if Path(str(installed.locate_file(""))).resolve() != ROOT:
        return
    for file in installed.files or ():
        if file.suffix == ".py" and file.hash is not None and file.hash.mode == "sha256":
            yield str(file), file.hash.value


def _digest(file: Path) -> str:
    try:
        digest = hashlib.sha256(file.read_bytes()).digest()
    except OSError:
        return ""
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _claimants(names: Sequence[str]) -> list[str]:
    """Other distributions whose RECORD lists any of these files."""
    from importlib.metadata import distributions

    files = set(names)
    claimants = {
        str(other.metadata["Name"])
        for other in distributions()
        if other.metadata["Name"] != "asyncpp" and files & {str(file) for file in other.files or ()}
    }
    return sorted(claimants)


def _source() -> str:
    """What pip installed asyncpp from."""
    from importlib.metadata import distribution

    try:
        url = str(json.loads(distribution("asyncpp").read_text("direct_url.json") or "{}")["url"])
    except (KeyError, TypeError, ValueError):
        return "asyncpp"
    return shlex.quote(url.removeprefix("file://"))
