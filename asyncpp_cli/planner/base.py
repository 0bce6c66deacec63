"""The run that is laid out: a model's, or the first cell of an experiment template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncpp_cli import templates
from asyncpp_cli.errors import UserError
from asyncpp_cli.matrix import expand
from asyncpp_cli.settings import SettingError, assign
from asyncpp_cli.template_file import load, settings_of
from asyncpp_cli.yaml_files import parse_value, read_mapping
from stages.config import RunConfig, tokens_per_step

CONTEXT = 2048
"""Tokens in a sequence, where neither the model's template nor the user says."""
TOKENS_PER_STEP = 2**19
"""Likewise, for a model alone: half a million tokens."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """What is laid out."""

    config: RunConfig
    tokens_per_step: int
    token_budget: float
    """Tokens of the whole run: the template's, or for a model alone 20 a parameter (arXiv 2203.15556)."""
    note: str
    """What a reader should know about the choice; maybe empty."""


def base_of(what: str, changes: Sequence[str]) -> Base:
    """The run that `what` names, a model template or an experiment template, with changes KEY=VALUE.

    Raises:
        UserError: there is no such template, or something in it or in a change is not accepted.
    """
    if what in templates.names("models") or _is_model_file(what):
        return _of_model(what, changes)
    template = load(what, changes)
    cells = expand(template, pinned=False)
    config = cells[0].config
    models = dict.fromkeys(cell.config.model.name for cell in cells)
    note = ""
    if len(models) > 1:
        note = f"{what} has the models {', '.join(models)}; this is about {config.model.name}"
    tokens = tokens_per_step(config)
    return Base(
        config=config, tokens_per_step=tokens, token_budget=float(tokens * config.train.steps), note=note
    )


def _is_model_file(what: str) -> bool:
    file = Path(what)
    if what in templates.names("experiments") or not file.is_file():
        return False
    return "layers" in read_mapping(file)


def _of_model(name: str, changes: Sequence[str]) -> Base:
    from stages.memory import parameter_count

    config = RunConfig()
    recommended = templates.recommended_settings(name, None)
    given: dict[str, Any] = {
        "train.steps": 1,
        "train.precision": "bfloat16",
        "data.context": CONTEXT,
        "schedule.name": "1f1b",
        "optimizer.name": "adamw",
    }
    given |= recommended
    asked = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise UserError(f"{change!r} changes nothing: write KEY=VALUE, as in optimizer=muon")
        asked[key] = parse_value(text, where=f"{key}=")
    try:
        assign(config, templates.model_settings(name, None))
        for key, value in (given | asked).items():
            assign(config, settings_of(key, value, folder=Path()))
    except SettingError as error:
        raise UserError(f"{error.key}: {error}") from error
    return Base(
        config=config,
        tokens_per_step=TOKENS_PER_STEP,
        token_budget=20.0 * parameter_count(config.model),
        note="",
    )
