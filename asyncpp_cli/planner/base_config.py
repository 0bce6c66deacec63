"""The run to plan: one of a model, or the first cell of an experiment template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.matrix import expand
from asyncpp_cli.experiment.own_code import Confirmed, check_confirmed, confirmed
from asyncpp_cli.experiment.parsing import settings_of, with_model
from asyncpp_cli.experiment.shipped import (
    another_size,
    model_content,
    not_found,
    read_model,
    template_names,
)
from asyncpp_cli.experiment.template import canonical, load, parse_setting
from asyncpp_cli.runs.settings import SettingError, with_settings
from stages.config.limits import check_limits
from stages.config.run_config import RunConfig, tokens_per_step
from stages.resolve.checks import ConfigError
from stages.resolve.model import check_model
from stages.resolve.optimizer import check_optimizer
from stages.shape.families import describe

CONTEXT = 2048
"""Tokens in a sequence, unless the model's template or the user sets it."""
TOKENS_PER_STEP = 2**19
"""Tokens per optimizer step of a model template: half a million."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """The run to plan."""

    config: RunConfig
    tokens_per_step: int
    has_steps: bool
    """Whether the run's steps are given; otherwise it reads 20 tokens per parameter (arXiv 2203.15556)."""
    note: str = ""
    """Note for the reader on the choice of the model; may be empty."""
    is_model: bool = False
    """Whether a model alone is planned, not an experiment with its own machine."""

    def tokens_of_run(self, tokens_per_step: int) -> float:
        """Tokens of the whole run with so many per step."""
        if self.has_steps:
            return float(tokens_per_step * self.config.train.steps)
        return 20.0 * describe(self.config.model).active_count


def base_of(what: str, changes: Sequence[str], *, allow_code: Sequence[str] = ()) -> Base:
    """The run of a template, with changes KEY=VALUE.

    Args:
        what: name or file of a model template or an experiment template.
        changes: settings that replace the template's.
        allow_code: modules of the user's own that the template may name.

    Raises:
        UserError: there is no such template, it or a change has a setting that is not accepted, or it names
            code that is not confirmed.
    """
    by_user = confirmed(allow_code, changes)
    if what in template_names("models") or _is_model_file(what):
        return _of_model(what, changes, by_user)
    if what in template_names("experiments") or Path(what).is_file():
        return _of_experiment(what, changes, by_user)
    names = [*template_names("models"), *template_names("experiments")]
    accepted = f"{not_found(what, names)}, or the path of a YAML file{another_size(what)}"
    raise UserError(f"model or experiment template {accepted}")


def _check(config: RunConfig, what: str) -> None:
    try:
        for check in (check_limits, check_optimizer, check_model):
            check(config)
    except ConfigError as error:
        raise UserError(f"{what}: {error}") from error


def _of_experiment(what: str, changes: Sequence[str], by_user: Confirmed) -> Base:
    template = load(what, changes)
    cells = expand(template, pinned=False, confirmed=by_user)
    config = cells[0].config
    _check(config, what)
    models = dict.fromkeys(cell.config.model.name for cell in cells)
    note = ""
    if len(models) > 1:
        note = f"{what} has the models {', '.join(models)}; this is about {config.model.name}"
    return Base(config=config, tokens_per_step=tokens_per_step(config), has_steps=True, note=note)


def _is_model_file(what: str) -> bool:
    file = Path(what)
    if what in template_names("experiments") or not file.is_file():
        return False
    return "layers" in model_content(file)


def _of_model(name: str, changes: Sequence[str], by_user: Confirmed) -> Base:
    config = RunConfig()
    defaults: dict[str, Any] = {
        "train.steps": 1,
        "train.precision": "bfloat16",
        "data.context": CONTEXT,
        "schedule.name": "1f1b",
        "optimizer.name": "adamw",
    }
    model = read_model(name, beside=None)
    defaults |= model.recommended
    changed = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise UserError(f"{change!r} changes nothing: write KEY=VALUE, as in optimizer=muon")
        changed[key] = parse_setting(key, text)
    try:
        config = with_settings(config, model.settings)
        for key, value in (defaults | changed).items():
            config = with_settings(config, with_model(settings_of(key, value, folder=Path())))
    except SettingError as error:
        raise UserError(f"{error.key}: {error}") from error
    check_confirmed([config], by_user, source=name)
    _check(config, name)
    return Base(
        config=config,
        tokens_per_step=TOKENS_PER_STEP,
        has_steps="train.steps" in map(canonical, changed),
        is_model=True,
    )
