"""Our packages have plain names (`stages`, `schedules`, `optimizers`): what may stand in their way.

`python -m` looks in the working folder first, where a user may have an `optimizers` of their own; and another
distribution may install a package of that name over ours. The first is of no consequence, since our names are
looked for where this package is. The second is told, with how to mend it.
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
"""Where our packages are, side by side."""

IMPORTED = ("stages", "schedules", "optimizers")
"""Packages that `asyncpp_cli` imports."""


class _Finder(MetaPathFinder):
    """Finds our packages beside this one, whatever `sys.path` begins with."""

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
    """See that from now on our packages are found beside this one.

    Raises:
        ImportError: another package of such a name has been imported already.
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
    """Our files that are not as they were installed, or gone; none in a checkout, where nobody knows."""
    return tuple(name for name, digest in _installed() if _digest(ROOT / name) != digest)


def what_happened() -> str | None:
    """What has become of our packages since they were installed, and how to mend it; None if nothing.

    A changed file counts only where another distribution claims it: somebody may have edited ours.
    """
    changed = changed_files()
    if not changed:
        return None
    others = _claimants(changed)
    gone = [name for name in changed if not (ROOT / name).is_file()]
    if not others and not gone:
        return None
    again = f"pip install --force-reinstall --no-deps {_source()}"
    if others:
        names = ", ".join(others)
        return (
            f"{ROOT / changed[0]} is not asyncpp's any more: {names} has installed a package of that name "
            f"over it. They cannot share an environment; to mend it: pip uninstall {names} && {again}"
        )
    return (
        f"{ROOT / gone[0]} is missing, as after the removal of another distribution with a package of that "
        f"name; to mend it: {again}"
    )


def _installed() -> Iterator[tuple[str, str]]:
    """Our Python files as the installation's record has them, each with its digest."""
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
    """Other distributions that say that some of these files are theirs."""
    from importlib.metadata import distributions

    wanted = set(names)
    found = {
        str(other.metadata["Name"])
        for other in distributions()
        if other.metadata["Name"] != "asyncpp" and wanted & {str(file) for file in other.files or ()}
    }
    return sorted(found)


def _source() -> str:
    """What pip installed us from."""
    from importlib.metadata import distribution

    try:
        url = str(json.loads(distribution("asyncpp").read_text("direct_url.json") or "{}")["url"])
    except (KeyError, TypeError, ValueError):
        return "asyncpp"
    return shlex.quote(url.removeprefix("file://"))
