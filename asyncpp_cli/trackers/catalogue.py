"""The trackers by name: a class in a module of its own, and a line here. `asyncpp mirror` follows."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncpp_cli.trackers.base import Tracker

TRACKERS = {
    "tensorboard": "TensorBoard",
    "wandb": "WeightsAndBiases",
}
"""The class of each tracker, by the name of its module."""


def tracker_class(name: str) -> type[Tracker]:
    """The tracker of this name, a key of `TRACKERS`."""
    module = importlib.import_module(f"asyncpp_cli.trackers.{name}")
    tracker: type[Tracker] = getattr(module, TRACKERS[name])
    return tracker
