"""The layouts that a plan lists, the best of all, and the one that it recommends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import schedules
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.base.progress import shown
from asyncpp_cli.planner.decision import KINDS, is_wanted, kind_of_delay
from asyncpp_cli.planner.estimate import Estimate
from asyncpp_cli.planner.fsdp import Sharded, best_sharded
from asyncpp_cli.planner.rank import best_first, delay_of
from asyncpp_cli.planner.shared import CostModel, Shared
from stages.config.run_config import RunConfig
from stages.resolve.schedule import can_tie


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What a plan finds."""

    pipelines: Sequence[Estimate]
    """The best that are different, and those that `best` names: those that fit first, then by step time."""
    further: int
    """How many of them are listed since `best` names them alone."""
    alike: int
    """How many others take as long as one of them, and differ from it in micro-batches and size alone."""
    best: dict[str, Estimate]
    """The best pipelines of all layouts that fit, by the kinds of `asyncpp_cli.planner.decision`."""
    sharded: Sequence[Sharded]
    """The best of FSDP and of HSDP that fit, the faster one first."""

    @property
    def synchronous(self) -> Estimate | Sharded | None:
        """The fastest synchronous layout that fits."""
        own = self.best.get(KINDS[0])
        found: list[Estimate | Sharded] = [*self.sharded, *([own] if own else [])]
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
    def recommended(self) -> Estimate | Sharded:
        """The layout that memory, settings and sentence are about: the delayed one if it is faster, else the
        best synchronous one, or the first where none fits."""
        return self.delayed or self.synchronous or self.pipelines[0]


def listed(
    base: RunConfig,
    costs: CostModel,
    *,
    gpus: int,
    tokens_per_step: int,
    names: Collection[str],
    limit_gb: float,
    rows: int,
    with_sharded: bool,
) -> Listing:
    """List layouts of a run.

    Args:
        base: the run.
        costs: of its parts.
        gpus: ranks.
        tokens_per_step: of all ranks.
        names: schedules to consider.
        limit_gb: memory of a GPU, 10^9 bytes.
        rows: pipelines to list. Of layouts that differ in micro-batches and size alone and take as long, the
            one with least memory is listed.
        with_sharded: list FSDP and HSDP, too.

    Raises:
        UserError: there is no layout.
    """
    asked: dict[str, Any] = {"gpus": gpus, "tokens_per_step": tokens_per_step, "limit_gb": limit_gb}
    alike: dict[tuple[Any, ...], list[Estimate]] = {}
    best: dict[str, Estimate] = {}
    missing = {KINDS[0]} if all(map(schedules.is_synchronous, names)) else set(KINDS[:2])
    last = 0.0

    def wanted(config: RunConfig) -> bool:
        delay = delay_of(config)
        return len(alike) < rows or delay is None or is_wanted(best, delay)

    with shown("comparing layouts"):
        for each in best_first(base, Shared(costs), names=names, wanted=wanted, **asked):
            fits = not each.exceeds(limit_gb)
            if fits and is_wanted(best, each.delay):
                best[kind_of_delay(each.delay)] = each
            seconds = f"{each.step.seconds:.3g}"
            same = seconds, f"{each.step.bubble:.1%}", each.delay
            key = (each.name, each.place, each.config.train.recompute, *same)
            if len(alike) < rows or key in alike:
                alike.setdefault(key, []).append(each)
                last = float(seconds)
            elif (missing <= best.keys() and float(seconds) != last) or not fits:
                break
    if not alike and base.model.tied:
        raise UserError(
            f"model.tied: no layout of {', '.join(names)} has embedding and head on one rank; accepted: "
            f"false, or --schedule {can_tie()[0]}, or one with shards of both, such as 2bw"
        )
    if not alike:
        raise UserError(f"no layout of {', '.join(names)} is possible with these numbers")
    first = [min(group, key=lambda each: each.memory_gb) for group in alike.values()]
    further = [each for each in best.values() if not any(each in group for group in alike.values())]
    # Of those that take as long as a best one, the one with least memory stands for it.
    best = {
        kind: next((one for one, group in zip(first, alike.values(), strict=True) if each in group), each)
        for kind, each in best.items()
    }
    pipelines = sorted((*first, *further), key=lambda each: (each.exceeds(limit_gb), each.step.seconds))
    return Listing(
        pipelines=pipelines,
        further=len(further),
        alike=sum(map(len, alike.values())) - len(first),
        best=best,
        sharded=best_sharded(base, costs=costs, **asked) if with_sharded else [],
    )
