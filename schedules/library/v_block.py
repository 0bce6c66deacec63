"""The periodic block of a pipeline folded into a V: start times that leave no rank idle in steady state.

Rank r of p holds stages r and 2 p - 1 - r, as in the V schedules of "Pipeline Parallelism with Controllable
Memory" (arXiv 2405.15362), but the pipeline is never flushed: each micro-batch repeats the block a period
later. A period is the time that a rank computes for one micro-batch, so a rank's actions, taken modulo the
period, must tile it exactly. Within that, a micro-batch should pass as quickly as possible: its activations
wait for its backward.

The search goes over ranks from the fold's open end to its tip. All that the next rank needs to know of a rank
is the cyclic order of its actions; from order to order only the least waiting per message counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

from schedules.actions import ScheduleError


class BlockCosts(NamedTuple):
    """Times of one stage, in whole numbers of any one unit; a whole backward takes both halves'."""

    forward: int
    input_half: int
    weight_half: int


EVEN_COSTS = BlockCosts(1, 1, 1)
"""A backward takes twice as long as a forward, and its halves are equal."""
MOST_COST = 24
"""Largest of the costs: the search goes over all times of a period."""


def block_costs(costs: Sequence[int]) -> BlockCosts:
    """These costs, checked.

    Raises:
        ScheduleError: They are not three, or one of them is not from 1 to `MOST_COST`.
    """
    if len(costs) != len(EVEN_COSTS) or not all(0 < cost <= MOST_COST for cost in costs):
        raise ScheduleError(
            f"costs are {list(costs)}; accepted: those of a forward and of the two halves of a backward, "
            f"whole numbers from 1 to {MOST_COST}"
        )
    return BlockCosts(*costs)


def whole_costs(forward: float, input_half: float, weight_half: float) -> BlockCosts:
    """The smallest costs in about these proportions: within 2 % of a micro-batch's time, or as near as
    `MOST_COST` allows; even ones if the times have no proportions. `uniform_costs` refuses negative times."""
    times = (forward, input_half, weight_half)
    if min(times) < 0 or not 0 < sum(times) < math.inf:
        return BlockCosts(*EVEN_COSTS)
    candidates = []
    for largest in range(1, MOST_COST + 1):
        unit = max(times) / largest
        costs = BlockCosts(*(max(1, round(time / unit)) for time in times))
        share = sum(times) / sum(costs)
        error = sum(abs(cost * share - time) for cost, time in zip(costs, times, strict=True)) / sum(times)
        if error <= 0.02:
            return costs
        candidates.append((error, costs))
    return min(candidates)[1]


@dataclass(frozen=True, kw_only=True)
class VBlock:
    """Start times of one micro-batch's actions, by stage, in units of the costs that were asked for."""

    period: int
    """Time between a micro-batch and the next."""
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    """Start of the whole backward, or of its input half."""
    weight: tuple[int, ...] | None
    """Start of the weight half; None: backwards are whole."""
    lifetimes: tuple[int, ...]
    """From the start of a stage's forward to the end of its backward (of the weight half, if split)."""


class _Order(NamedTuple):
    """A cyclic order of a rank's actions without gaps: start times modulo the period.

    The near stage is r, the far stage 2 p - 1 - r. The near forward starts at 0.
    """

    near_forward: int
    far_forward: int
    far_backward: int
    near_backward: int
    far_weight: int
    near_weight: int
    weight_wait: int
    """Time that the two weight halves wait after their input halves."""


class _Step(NamedTuple):
    """Time from a rank to the next one towards the tip, or back, from start to start."""

    near_forward: int
    far_forward: int
    far_backward: int
    near_backward: int

    @property
    def outside(self) -> int:
        """Added to the near stage's lifetime at every rank nearer to the open end."""
        return self.near_forward + self.near_backward

    @property
    def inside(self) -> int:
        """Added to the far stage's lifetime at every rank nearer to the tip."""
        return self.far_forward + self.far_backward


class _Path(NamedTuple):
    """Orders of the ranks so far. A path no better than another in all three sums is dropped."""

    total: int
    """All waiting and computing between the first forward and the last backward so far."""
    balance: int
    """How much longer the latest rank's activations live than the first rank's, weight halves apart."""
    worst: int
    """The largest such difference over the ranks so far, with the waiting of weight halves."""
    order: int
    step: _Step | None
    before: _Path | None


@lru_cache(maxsize=256)
def v_block(*, ranks: int, forward: int, backward: int, weight: int, message: int) -> VBlock:
    """The block whose fullest rank holds activations for the shortest time.

    Args:
        ranks: Pipeline ranks p; there are 2 p stages.
        forward: Cost of one stage's forward, a positive whole number.
        backward: Cost of its backward, or of the input half.
        weight: Cost of the weight half; 0: backwards are whole.
        message: Time that is left for each message between ranks.
    """
    period = 2 * (forward + backward + weight)
    orders, ways = _orders_and_ways(forward=forward, backward=backward, weight=weight, message=message)
    fronts = [
        [
            _Path(
                2 * _after(order.far_forward, order.far_backward, forward, period),
                0,
                order.weight_wait,
                i,
                None,
                None,
            )
        ]
        for i, order in enumerate(orders)
    ]
    for _ in range(1, ranks):
        fronts = _one_rank_further(fronts, orders, ways, slack=period // 2)
    # Of two that are alike the one whose first rank, which has the model's ends, holds less.
    tip = min(
        (first_rank + path.worst, first_rank, path)
        for front in fronts
        for path in front
        for first_rank in [path.total + _turn(orders[path.order], forward, backward, period)]
    )[2]
    return _block(tip, orders, forward=forward, backward=backward, weight=weight)


class _Way(NamedTuple):
    """A step from a rank's order to one of the next rank, by their numbers."""

    here: int
    there: int
    longer: int
    """What it adds to the total of a path."""
    step: _Step


@lru_cache(maxsize=64)
def _orders_and_ways(
    *, forward: int, backward: int, weight: int, message: int
) -> tuple[list[_Order], list[_Way]]:
    """The orders, and the ways from each to each."""
    period = 2 * (forward + backward + weight)
    orders = _orders(forward=forward, backward=backward, weight=weight)
    ways = [
        _Way(i, j, step.inside + step.outside, step)
        for i, here in enumerate(orders)
        for j, there in enumerate(orders)
        for step in _steps(here, there, period=period, forward=forward + message, backward=backward + message)
    ]
    return orders, ways


def _orders(*, forward: int, backward: int, weight: int) -> list[_Order]:
    """Every cyclic order; of those that differ in the weight halves alone, the one that waits least."""
    period = 2 * (forward + backward + weight)
    costs = {"far_forward": forward, "far_backward": backward, "near_backward": backward}
    if weight:
        costs |= {"far_weight": weight, "near_weight": weight}
    best: dict[tuple[int, ...], _Order] = {}
    for names in permutations(costs):
        starts, time = {"far_weight": 0, "near_weight": 0}, forward
        for name in names:
            starts[name] = time
            time += costs[name]
        wait = 0
        if weight:
            for side in ("far", "near"):
                wait += (starts[f"{side}_weight"] - starts[f"{side}_backward"] - backward) % period
        order = _Order(near_forward=0, weight_wait=wait, **starts)
        key = order[:4]
        if key not in best or wait < best[key].weight_wait:
            best[key] = order
    return list(best.values())


def _after(start: int, later: int, least: int, period: int) -> int:
    """The least time from `start` to `later`, both modulo the period, that is at least `least`."""
    return least + (later - start - least) % period


def _steps(here: _Order, there: _Order, *, period: int, forward: int, backward: int) -> list[_Step]:
    """The undominated ways from one rank's order to the next rank's, over all rotations of the second."""
    steps = [
        _Step(
            near_forward=_after(here.near_forward, there.near_forward + turn, forward, period),
            far_forward=_after(there.far_forward + turn, here.far_forward, forward, period),
            far_backward=_after(here.far_backward, there.far_backward + turn, backward, period),
            near_backward=_after(there.near_backward + turn, here.near_backward, backward, period),
        )
        for turn in range(period)
    ]
    kept: list[_Step] = []
    for step in sorted(steps, key=lambda step: (step.outside, step.inside)):
        if not kept or step.inside < kept[-1].inside:
            kept.append(step)
    return kept


def _one_rank_further(
    fronts: list[list[_Path]], orders: list[_Order], ways: list[_Way], *, slack: int
) -> list[list[_Path]]:
    totals = [min((path.total for path in front), default=math.inf) for front in fronts]
    # What lies further behind the best than the cost of any change of order does not catch up.
    most = slack + min(totals[here] + longer for here, _, longer, _ in ways)
    found: list[list[_Path]] = [[] for _ in orders]
    for here, there, longer, step in ways:
        if totals[here] + longer > most:
            continue
        for path in fronts[here]:
            if path.total + longer <= most:
                balance = path.balance + step.inside - step.outside
                worst = max(path.worst, balance + orders[there].weight_wait)
                found[there].append(_Path(path.total + longer, balance, worst, there, step, path))
    return [_undominated(paths) for paths in found]


def _undominated(paths: list[_Path]) -> list[_Path]:
    kept: list[_Path] = []
    for path in sorted(paths, key=lambda path: path[:3]):
        if not any(other.balance <= path.balance and other.worst <= path.worst for other in kept):
            kept.append(path)
    return kept


def _turn(order: _Order, forward: int, backward: int, period: int) -> int:
    """Time at the tip: from its near forward to its far one, and from its far backward to its near one."""
    return _after(order.near_forward, order.far_forward, forward, period) + _after(
        order.far_backward, order.near_backward, backward, period
    )


def _block(tip: _Path, orders: list[_Order], *, forward: int, backward: int, weight: int) -> VBlock:
    period = 2 * (forward + backward + weight)
    path: _Path | None = tip
    ranks = []
    while path is not None:
        ranks.append(path)
        path = path.before
    ranks.reverse()
    order = orders[tip.order]
    steps = [path.step for path in ranks if path.step is not None]
    forwards = [0]
    for step in steps:
        forwards.append(forwards[-1] + step.near_forward)
    forwards.append(forwards[-1] + _after(order.near_forward, order.far_forward, forward, period))
    for step in reversed(steps):
        forwards.append(forwards[-1] + step.far_forward)
    first = orders[ranks[0].order]
    backwards = [forwards[-1] + _after(first.far_forward, first.far_backward, forward, period)]
    for step in steps:
        backwards.append(backwards[-1] + step.far_backward)
    backwards.append(backwards[-1] + _after(order.far_backward, order.near_backward, backward, period))
    for step in reversed(steps):
        backwards.append(backwards[-1] + step.near_backward)
    backwards.reverse()
    weights = None
    ends = [start + backward for start in backwards]
    if weight:
        near = [
            _after(orders[path.order].near_backward, orders[path.order].near_weight, backward, period)
            for path in ranks
        ]
        far = [
            _after(orders[path.order].far_backward, orders[path.order].far_weight, backward, period)
            for path in ranks
        ]
        weights = tuple(start + wait for start, wait in zip(backwards, [*near, *reversed(far)], strict=True))
        ends = [start + weight for start in weights]
    return VBlock(
        period=period,
        forward=tuple(forwards),
        backward=tuple(backwards),
        weight=weights,
        lifetimes=tuple(end - start for start, end in zip(forwards, ends, strict=True)),
    )
