"""Cells of small experiment templates."""

from __future__ import annotations

from pathlib import Path

import yaml

from asyncpp_cli.experiment.matrix import ResolvedCell, expand
from asyncpp_cli.experiment.template import load

BASE = {"model": "micro", "train": {"steps": 3}}


def cells_of(folder: Path, content: dict[str, object], *changes: str) -> list[ResolvedCell]:
    """The cells of a template with this content."""
    file = folder / "template.yaml"
    file.write_text(yaml.safe_dump(BASE | content, sort_keys=False))
    return expand(load(str(file), changes))
