"""The layouts that a plan lists, the best of each kind, and the one that it recommends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import schedules
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.planner.estimate import Estimate
from asyncpp_cli.planner.fsdp import Sharded, best_sharded
from asyncpp_cli.planner.rank import best_first, least_delay
from asyncpp_cli.planner.shared import Shared
from stages.config.run_config import RunConfig, changed, chosen_correction
from stages.resolve.schedule import can_tie

Layout = Estimate | Sharded

KINDS = ("synchronous", "delay 1", "more delay")
"""Kinds of pipelines that are told apart: their weights take different numbers of steps to a loss."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What a plan finds."""

    pipelines: Sequence[Estimate] = ()
    """The best that are different, and those that `best` names: those that fit first, then by step time."""
    further: int = 0
    """How many of them are listed since `best` names them alone."""
    alike: int = 0
    """How many others take as long as one of them, and differ from it in micro-batches and size alone."""
    best: Mapping[str, Estimate] = field(default_factory=dict)
    """The best pipelines of all layouts that fit, with a delay also with error feedback, by `KINDS`; of more
    delay only one that is faster than the others."""
    sharded: Sequence[Sharded] = ()
    """The best of FSDP and of HSDP that fit, the faster one first."""

    @property
    def synchronous(self) -> Layout | None:
        """The fastest synchronous layout that fits."""
        own = self.best.get(KINDS[0])
        found: list[Layout] = [*self.sharded, *([own] if own else [])]
        return min(found, key=lambda each: each.step.seconds, default=None)

    @property
    def delayed(self) -> Estimate | None:
        """The best layout with the least delay that is faster than the fastest synchronous one: what a delay
        of one costs is known best."""
        limit = self.synchronous
        for kind in KINDS[1:]:
            found = self.best.get(kind)
            if found is not None and (limit is None or found.step.seconds < limit.step.seconds):
                return found
        return None

    @property
    def recommended(self) -> Layout:
        """The layout that memory, settings and sentence are about: the delayed one if it is faster, else the
        best synchronous one, or the first where none fits."""
        return self.delayed or self.synchronous or self.pipelines[0]


def listed(
    base: RunConfig,
    shared: Shared,
    *,
    names: Collection[str],
    limit_gb: float,
    rows: int = 0,
    with_sharded: bool,
    **numbers: int,
) -> Listing:
    """List layouts of a run.

    Args:
        base: the run.
        shared: with the costs of its parts.
        names: schedules to consider.
        limit_gb: memory of a GPU, 10^9 bytes.
        rows: pipelines to list beside the best. Of layouts that differ in micro-batches and size alone and
            take as long, the one with least memory is listed.
        with_sharded: list FSDP and HSDP, too.
        numbers: `gpus` and `tokens_per_step` of all of them.

    Raises:
        UserError: there is no layout.
    """
    asked: dict[str, Any] = {"limit_gb": limit_gb, **numbers}
    alike: dict[tuple[Any, ...], list[Estimate]] = {}
    best: dict[str, Estimate] = {}
    missing = {KINDS[0]} if all(map(schedules.is_synchronous, names)) else set(KINDS[:2])
    last = 0.0

    def wanted(config: RunConfig) -> bool:
        return len(alike) < rows or _may_be_best(best, least_delay(config))

    for each in best_first(base, shared, names=names, wanted=wanted, **asked):
        fits = not each.exceeds(limit_gb)
        if fits and _may_be_best(best, each.delay) and has_room(each, limit_gb=limit_gb):
            best[_kind_of(each.delay)] = each
        seconds = f"{each.step.seconds:.3g}"
        same = seconds, f"{each.step.bubble:.1%}", each.delay
        key = (each.name, each.place, each.config.train.recompute, *same)
        if len(alike) < rows or key in alike:
            alike.setdefault(key, []).append(each)
            last = float(seconds)
        elif (missing <= best.keys() and float(seconds) != last) or not fits:
            break
    if rows and not alike:
        raise _no_layout(base, names)
    first = [min(group, key=lambda each: each.memory_gb) for group in alike.values()]
    further = [each for each in best.values() if not any(each in group for group in alike.values())]
    # Of those that take as long as a best one, the one with least memory stands for it.
    best = {
        kind: next((one for one, group in zip(first, alike.values(), strict=True) if each in group), each)
        for kind, each in best.items()
    }
    return Listing(
        pipelines=sorted((*first, *further), key=lambda each: (each.exceeds(limit_gb), each.step.seconds)),
        further=len(further),
        alike=sum(map(len, alike.values())) - len(first),
        best=best,
        sharded=best_sharded(base, costs=shared.costs, **asked) if with_sharded else (),
    )


def _no_layout(base: RunConfig, names: Collection[str]) -> UserError:
    if base.model.tied:
        return UserError(
            f"model.tied: no layout of {', '.join(names)} has embedding and head on one rank; accepted: "
            f"false, or --schedule {can_tie()[0]}, or one with shards of both, such as 2bw"
        )
    return UserError(f"no layout of {', '.join(names)} is possible with these numbers")


def _may_be_best(best: Mapping[str, Estimate], delay: int) -> bool:
    """Whether a layout of a delay, no faster than the best so far of each kind, may be the best of its own:
    none of its kind is known, and of more delay none of any."""
    kind = _kind_of(delay)
    return not (best.keys() & (set(KINDS) if kind == KINDS[2] else {kind}))


def has_room(layout: Estimate, *, limit_gb: float) -> bool:
    """Whether a layout with a delay also fits with error feedback, which is advised for it."""
    if not layout.delay or chosen_correction(layout.config) is not None:
        return True
    corrected = changed(layout.config, {"error_feedback.coefficient": 1.0})
    return not replace(layout, config=corrected).exceeds(limit_gb)


def _kind_of(delay: int) -> str:
    """One of `KINDS`."""
    return KINDS[min(delay, 2)]
