"""What a person types. Starts without importing torch, submitit or polars: commands import what they need.

Protects asyncpp's packages with common names (`stages`, `schedules`, `optimizers`) from name clashes: `python
-m` searches the working folder first, which may hold a user's own `optimizers`. Ours are imported from the
folder of this package instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
"""The folder of our packages."""

IMPORTED = ("stages", "schedules", "optimizers")
"""Packages that `asyncpp_cli` imports."""


class _Finder(MetaPathFinder):
    """Finds our packages in the folder of this one, whatever `sys.path` holds."""

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
    """Import our packages from the folder of this one from now on.

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


find_our_own()
