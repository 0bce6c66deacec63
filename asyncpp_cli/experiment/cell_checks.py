"""Checks that every cell of a template can be trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from asyncpp_cli.base.console import refuse_all, say
from asyncpp_cli.experiment.matrix import ResolvedCell, describe
from asyncpp_cli.experiment.template import Template
from stages.config.run_config import RunConfig


def check_cells(template: Template, cells: list[ResolvedCell]) -> None:
    """Check that every cell of the template can be trained.

    Raises:
        UserError: some cannot; names the file, the key and the first such cell. Cells that are refused for
            one reason share a line; of several reasons all but the last are printed.
    """
    from stages.resolve.checks import resolve
    from stages.resolve.facts import Resolved

    # Each data set, module and folder of weights is looked at once, however many cells use it.
    vocabularies: dict[str, Any] = {}
    models: dict[str, list[str]] = {}
    checked: dict[bytes, list[str]] = {}
    refused: dict[str, list[ResolvedCell]] = {}
    for resolved in cells:
        # The seed does not decide whether a run can be trained.
        config = replace(resolved.config, seed=0)
        text = msgspec.json.encode(config)
        if text not in checked:
            found = resolve(config, seen=vocabularies)
            if isinstance(found, Resolved):
                model = f"{config.model} {config.data.context}"
                if model not in models:
                    problem = _problem_of_own_model(config) or _problem_of_initial_weights(config)
                    models[model] = [problem] if problem else []
                checked[text] = models[model]
            else:
                checked[text] = [
                    f"{each.key}: {line}" for each in found for line in each.message.splitlines()
                ]
        for problem in checked[text]:
            refused.setdefault(problem, []).append(resolved)
    refuse_all([f"{template.source}: {problem} ({_counted(alike)})" for problem, alike in refused.items()])


def _problem_of_own_model(config: RunConfig) -> str:
    """Why a model of the user's own is not accepted; empty if it is, or there is none."""
    if config.model.factory is None:
        return ""
    from stages.model.custom import FactoryError, check_causal

    try:
        why = check_causal(config.model, context=config.data.context)
    except FactoryError as error:
        return f"model.factory: {error}"
    if why:
        say(
            f"note: {config.model.factory} cannot be computed here ({why}): it is not known "
            "whether an output depends on later tokens"
        )
    return ""


def _problem_of_initial_weights(config: RunConfig) -> str:
    """Why initial weights are not accepted; empty if they are, or there are none.

    Not a check of the run: one that resumes from a checkpoint does not need them.
    """
    if config.model.init is None:
        return ""
    from stages.checkpoint.initial_weights import InitError, check_init, check_values

    if config.model.factory is not None:
        return "model.init: is for the built-in decoder; model.factory builds another model"
    try:
        check_init(config.model)
        check_values(config.model)
    except InitError as error:
        return f"model.init: {error}"
    return ""


def _counted(cells: Sequence[ResolvedCell]) -> str:
    """Which cells, for messages."""
    first = describe(cells[0].cell.axes)
    return f"cell {first}" if len(cells) == 1 else f"{len(cells)} cells; first {first}"
