"""Custom optimizers are called `package.module:name`."""

from __future__ import annotations

import difflib
import pkgutil
from importlib import import_module
from typing import Any


def is_custom(name: str) -> bool:
    """Whether `name` names a custom optimizer."""
    return ":" in name


def import_named(named: str) -> Any:
    """The object called `package.module:name`.

    Raises:
        ImportError, AttributeError: there is none; the message has the nearest name that there is.
    """
    module_name, _, name = named.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        # Not for a module that the custom one imports.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        package, _, missing = error.name.rpartition(".")
        modules = pkgutil.iter_modules(getattr(import_module(package), "__path__", ()) if package else None)
        near = difflib.get_close_matches(missing, [each.name for each in modules], n=1, cutoff=0.7)
        near = [".".join(filter(None, (package, each))) for each in near]
        raise ModuleNotFoundError(f"no module {error.name!r}{_meant(near)}", name=error.name) from None
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1)
        raise AttributeError(f"{module_name} has no {name!r}{_meant(near)}")
    return getattr(module, name)


def _meant(near: list[str]) -> str:
    return f"; did you mean {near[0]}?" if near else ""
