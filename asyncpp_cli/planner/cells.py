"""What each cell of a matrix is expected to take, and whether it fits its site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncpp_cli.cluster.sites import Site
from asyncpp_cli.errors import UserError
from asyncpp_cli.matrix import ResolvedCell, describe
from asyncpp_cli.planner.devices import find_device
from asyncpp_cli.planner.estimate import Costs, Estimate, estimate
from asyncpp_cli.planner.parts import Roofline
from stages.config import RunConfig


@dataclass(frozen=True)
class Expected:
    """What a cell is expected to take; None is what is not known."""

    memory_gb: float | None
    """Of its fullest rank, 10^9 bytes; None for a model of the user's own."""
    step_seconds: float | None
    """None likewise, and where `site.gpu` does not say what its ranks compute on."""


def expected(source: str, cells: Sequence[ResolvedCell], *, site: Mapping[str, Any]) -> list[Expected]:
    """What each cell is expected to take.

    Args:
        source: the template, for messages.
        cells: that could be trained.
        site: settings of the section `site` that hold instead of the cells' own.

    Raises:
        UserError: one needs more memory than `site.memory_gb`, or `site.gpu` is not known.
    """
    known: dict[str, Expected] = {}
    found = []
    for resolved in cells:
        config = replace(resolved.config, site=replace(resolved.config.site, **site))
        key = _what_counts(config)
        if key not in known:
            known[key] = _expected(source, ResolvedCell(resolved.cell, config))
        found.append(known[key])
    return found


def _what_counts(config: RunConfig) -> str:
    """Two runs that agree in this take the same."""
    train, site = config.train, config.site
    # Rates and decays change no size; the other options of an optimizer may.
    optimizer = replace(config.optimizer, lr=0.0, weight_decay=0.0, warmup=0.0, final_lr=0.0)
    sections = (config.schedule, optimizer, config.error_feedback, config.correction, config.model)
    numbers = (train.microbatch_size, train.clip, train.precision, train.recompute, config.data.context)
    return repr((*sections, config.parallel, *numbers, site.gpu, site.memory_gb))


def device_of(site: Site) -> dict[str, Any]:
    """What a site profile says of its GPUs: `memory_gb` and `gpu`, as far as it does."""
    return {key: value for key, value in site.run.items() if key in ("memory_gb", "gpu")}


def _expected(source: str, resolved: ResolvedCell) -> Expected:
    config = resolved.config
    if config.model.factory is not None:
        return Expected(None, None)
    costs: Costs = Roofline(find_device(config.site.gpu or "h100", key=f"{source}: site.gpu"))
    planned = estimate(config, costs, limit_gb=None)
    limit = config.site.memory_gb
    if limit is not None and planned.memory_gb > limit:
        raise UserError(
            f"{source}: site.memory_gb: {_what_is_too_large(planned, limit)} "
            f"(cell {describe(resolved.cell.axes)}); {_advice(config, costs, limit)}"
        )
    return Expected(planned.memory_gb, planned.step.seconds if config.site.gpu is not None else None)


def _what_is_too_large(planned: Estimate, limit: float) -> str:
    sizes = planned.stage_gb
    stage = max(range(len(sizes)), key=sizes.__getitem__)
    kinds = sorted(planned.memory[stage].items(), key=lambda item: -item[1])
    largest = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in kinds[:4])
    where = f"stage {stage} needs {sizes[stage]:.1f} GB ({largest})"
    if planned.config.schedule.chunks > 1:
        where = f"a rank needs {planned.memory_gb:.1f} GB, of which {where}"
    return f"{where} and a device has {limit:g}"


def _advice(config: RunConfig, costs: Costs, limit: float) -> str:
    for words, changed in _changes(config):
        planned = estimate(changed, costs, limit_gb=limit)
        if planned.memory_gb <= limit:
            cut = list(planned.cut)
            given = estimate(changed, costs, limit_gb=None)
            by_cut = f"parallel.cut: {cut}" if planned.cut != given.cut else ""
            return f"it would fit with {' and '.join(filter(None, (words, by_cut)))}"
    return "`asyncpp plan` shows layouts that fit"


def _changes(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Changes that take less memory, the smallest first."""
    yield "", config
    if config.schedule.ahead > 1:
        yield "schedule.ahead: 1", replace(config, schedule=replace(config.schedule, ahead=1))
    if not config.train.recompute:
        yield "train.recompute: true", replace(config, train=replace(config.train, recompute=True))
    if config.train.microbatch_size > 1:
        train = replace(config.train, microbatch_size=1)
        yield "train.microbatch_size: 1", replace(config, train=train)
        yield (
            "train.microbatch_size: 1, train.recompute: true",
            replace(config, train=replace(train, recompute=True)),
        )
