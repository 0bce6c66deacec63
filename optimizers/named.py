"""Optimizers of a user's own are called `package.module:name`."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def is_custom(name: str) -> bool:
    """Whether `name` names an optimizer of a user's own."""
    return ":" in name


def import_named(named: str) -> Any:
    """The object called `package.module:name`.

    Raises:
        ImportError, AttributeError: there is none.
    """
    module, _, name = named.partition(":")
    return getattr(import_module(module), name)
