"""Templates that train planned layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncpp_cli.experiment.template import canonical
from asyncpp_cli.planner.base_config import Base
from asyncpp_cli.planner.costs.devices import Device, description
from asyncpp_cli.planner.fsdp import Sharded
from asyncpp_cli.planner.listing import Layout, Listing
from asyncpp_cli.runs.settings import items

_FEEDBACK = ("error_feedback.", "correction.")
LENGTHS = (0.75, 1, 1.25)
"""Lengths of the runs that decide, over the planned one: steps to a loss are found between them."""


def settings_of(layout: Layout, base: Base) -> dict[str, Any]:
    """What a layout sets beyond the planned run, by configuration key."""
    before = dict(items(base.config))
    always = ("schedule.name", "schedule.microbatches", "parallel.stages", "parallel.data")
    changed = {
        key: value
        for key, value in items(layout.config)
        if value != before.get(key) or key in (*always, "train.microbatch_size")
    }
    whole = isinstance(layout, Sharded) or layout.own_cut
    return changed if whole else changed | {"parallel.cut": list(layout.cut)}


def rival(found: Listing) -> Layout | None:
    """The synchronous layout that the recommended one is trained beside; None where that is itself
    synchronous, or none fits."""
    return found.synchronous if found.delayed is not None else None


def template_text(
    what: str,
    base: Base,
    changes: Sequence[str],
    layout: Layout,
    *,
    other: Layout | None,
    tokens: int,
    device: Device | None,
) -> str:
    """A template, in YAML.

    Args:
        what: the planned model or template; a file is named by its full path, since the new template may be
            in another folder.
        base: what was planned.
        changes: given as KEY=VALUE.
        layout: to train. Its settings replace changes of the same keys.
        other: a synchronous layout to train beside it, which is then trained at three lengths, with error
            feedback and without; None: train `layout` alone.
        tokens: per step.
        device: GPU with its links, for the times of `sweep`; None: not known.
    """
    name = json.dumps(str(Path(what).resolve())) if Path(what).is_file() else what
    # What is measured are whole steps to a loss, of one synchronous layout.
    lines = {"base": name, "speed_steps": "null"}
    steps = round(base.tokens_of_run(tokens) / tokens)
    if base.is_model:
        lines = {"model": name, "optimizer": base.config.optimizer.name}
        lines |= {"train.steps": f"{steps}  # 20 tokens per active parameter"}
        # An experiment's own defaults are those of small runs on a CPU.
        lines |= {
            "data.context": str(base.config.data.context),
            "train.precision": base.config.train.precision,
        }
    lines |= {canonical(key): text for key, _, text in (change.partition("=") for change in changes)}
    if device is not None:
        lines["site.gpu"] = json.dumps(description(device))
    if (memory := base.config.site.memory_gb) is not None:
        lines["site.memory_gb"] = json.dumps(memory)
    own = settings_of(layout, base)
    if other is not None:
        lines |= _matrix(layout, own, other, settings_of(other, base), steps=steps)
        own = {key: value for key, value in own.items() if not key.startswith(_FEEDBACK)}
        own.pop("schedule.name")
        lines.pop("train.steps", None)
    lines |= {canonical(key): json.dumps(value) for key, value in own.items()}
    return "".join(f"{key}: {text}\n" for key, text in lines.items())


def _matrix(
    layout: Layout, own: Mapping[str, Any], other: Layout, others: Mapping[str, Any], *, steps: int
) -> dict[str, str]:
    """The keys of a template that trains a layout with a delay, with error feedback and without, beside a
    synchronous one of the middle length."""
    of_other = dict(items(other.config)) | {"parallel.cut": others.get("parallel.cut")}
    # Nothing of the first may stay.
    kept = {
        canonical(key): of_other.get(key)
        for key in dict.fromkeys([*own, *others])
        if key != "schedule.name" and not key.startswith(_FEEDBACK) and of_other.get(key) != own.get(key)
    }
    delayed, synchronous = layout.config.schedule.name, other.config.schedule.name
    lengths = [round(share * steps) for share in LENGTHS]
    matrix = {"schedule": [synchronous, delayed], "error_feedback": [False, True], "train.steps": lengths}
    excluded = {"error_feedback": True}, {"train.steps": [lengths[0], lengths[-1]]}
    return {
        "matrix": json.dumps(matrix),
        "exclude": json.dumps([{"schedule": synchronous} | each for each in excluded]),
        "overrides": json.dumps([{"when": {"schedule": synchronous}, "set": kept}]),
    }
