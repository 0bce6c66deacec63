"""Which candidates go on, from what their runs' folders say."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.runs.status import Cause, State, Status
from asyncpp_cli.tune.plan import Arm, Candidate, Plan, Question
from asyncpp_cli.tune.result import Tuning
from asyncpp_cli.tune.standing import ArmStanding, RunRecord, arm_standing

RUNGS = (4, 8, 16)


def arm_of(candidates: int, *, seeds: int = 1, rungs: tuple[int, ...] = RUNGS) -> Arm:
    return Arm(
        axes={"schedule": "2bw"},
        rungs=rungs,
        candidates=tuple(
            Candidate(values={"optimizer.lr": index}, runs=tuple(f"{index}-{seed}" for seed in range(seeds)))
            for index in range(candidates)
        ),
    )


def killed(run: str, losses: dict[int, float], *, saved_step: int | None) -> RunRecord:
    status = Status(state=State.FAILED, cause=Cause.KILLED)
    return RunRecord(id=run, status=status, saved_step=saved_step, losses=losses)


def record(run: str, losses: dict[int, float], *, state: State | None = None) -> RunRecord:
    step = max(losses, default=0)
    state = state or (State.PAUSED if losses else State.PENDING)
    cause = Cause.ERROR if state == State.FAILED else Cause.NONE
    return RunRecord(
        id=run, status=Status(state=state, cause=cause, step=step), saved_step=step or None, losses=losses
    )


class Simulated:
    """Runs with given losses, trained one rung at a time."""

    def __init__(self, arm: Arm, losses: dict[str, dict[int, float]], *, failing: frozenset[str]) -> None:
        self.arm = arm
        self.losses = losses
        self.failing = failing
        self.records = {run: record(run, {}) for run in losses}
        self.steps = dict.fromkeys(losses, 0)

    def standing(self) -> ArmStanding:
        return arm_standing(self.arm, self.records, eta=2)

    def train(self, run: str, step: int) -> None:
        assert step > self.steps[run], "trained twice"
        self.steps[run] = step
        if run in self.failing:
            self.records[run] = record(run, self.records[run].losses, state=State.FAILED)
        else:
            self.records[run] = record(run, self.records[run].losses | {step: self.losses[run][step]})


def reference(simulated: Simulated) -> tuple[int | None, int]:
    """Successive halving, all at once: the best candidate, and the steps of all runs."""
    arm = simulated.arm
    alive = list(range(len(arm.candidates)))
    steps = dict.fromkeys(simulated.losses, 0)
    means: dict[int, float] = {}
    for level, step in enumerate(arm.rungs):
        for index in alive:
            losses = []
            for run in arm.candidates[index].runs:
                steps[run] = step
                losses.append(math.inf if run in simulated.failing else simulated.losses[run][step])
            finite = all(math.isfinite(loss) for loss in losses)
            means[index] = sum(losses) / len(losses) if finite else math.inf
        ranked = sorted((means[index], index) for index in alive if means[index] < math.inf)
        alive = [index for _, index in ranked]
        if level + 1 < len(arm.rungs):
            alive = alive[: math.ceil(len(arm.candidates) / 2 ** (level + 1))]
    return (alive[0] if alive else None), sum(steps.values())


def test_of_equal_candidates_the_first_of_the_plan_goes_on_at_every_rung() -> None:
    arm = arm_of(4, rungs=(4, 8, 16))
    # The third and the first go on; then they are equal, though the third was better before.
    losses = [{4: 2.0, 8: 1.5}, {4: 3.0}, {4: 1.0, 8: 1.5}, {4: 3.0}]
    standing = arm_standing(arm, {f"{i}-0": record(f"{i}-0", each) for i, each in enumerate(losses)}, eta=2)
    assert standing.due == {"0-0": 16}


# In eighths: means over one or two seeds are then exact, whatever the order of their sum.
LOSSES = st.one_of(st.integers(8, 24).map(lambda eighths: eighths / 8), st.just(math.nan))


@given(
    losses=st.lists(st.tuples(*[LOSSES] * len(RUNGS)), min_size=2, max_size=9),
    seeds=st.integers(1, 2),
    failing=st.sets(st.integers(0, 8), max_size=3),
    chance=st.randoms(use_true_random=False),
)
def test_any_order_with_interruptions_gives_the_same_result(
    losses: list[tuple[float, ...]], seeds: int, failing: set[int], chance: random.Random
) -> None:
    """Due runs are trained one by one in any order, and the standing is taken anew after each of them."""
    arm = arm_of(len(losses), seeds=seeds)
    by_run = {
        run: dict(zip(RUNGS, losses[index], strict=True))
        for index, candidate in enumerate(arm.candidates)
        for run in candidate.runs
    }
    simulated = Simulated(arm, by_run, failing=frozenset(f"{index}-0" for index in failing) & by_run.keys())
    while due := simulated.standing().due:
        simulated.train(*chance.choice(sorted(due.items())))
    best, steps = reference(simulated)
    standing = simulated.standing()
    found = None if standing.best is None else standing.best.candidate.values["optimizer.lr"]
    assert found == best
    assert standing.steps == steps == sum(simulated.steps.values())


def test_a_loss_without_its_checkpoint_is_not_enough() -> None:
    """It was killed after the evaluation, before it had saved."""
    arm = arm_of(2, rungs=(4, 8))
    first = killed("0-0", {4: 1.0}, saved_step=2)
    assert arm_standing(arm, {"0-0": first, "1-0": record("1-0", {4: 2.0})}, eta=2).due == {"0-0": 4}


def test_a_killed_run_is_due_again_and_one_that_failed_is_not() -> None:
    arm = arm_of(2, rungs=(4, 8))
    first = killed("0-0", {}, saved_step=None)
    failed = record("1-0", {}, state=State.FAILED)
    assert arm_standing(arm, {"0-0": first, "1-0": failed}, eta=2).due == {"0-0": 4}
    both = {"0-0": record("0-0", {}, state=State.FAILED), "1-0": failed}
    standing = arm_standing(arm, both, eta=2)
    assert (standing.due, standing.best) == ({}, None)


def test_a_run_beyond_its_rung_without_an_evaluation_is_refused() -> None:
    arm = arm_of(2, rungs=(4, 8))
    beyond = RunRecord(id="0-0", status=Status(state=State.INTERRUPTED), saved_step=6, losses={})
    with pytest.raises(UserError, match="0-0 has trained to step 6"):
        arm_standing(arm, {"0-0": beyond, "1-0": record("1-0", {})}, eta=2)


@pytest.mark.parametrize(("best", "on_edge"), [(0, True), (1, False), (2, True)])
def test_the_edge_of_what_was_tried(best: int, on_edge: bool) -> None:
    arm = arm_of(3, rungs=(4,))
    records = {f"{index}-0": record(f"{index}-0", {4: 1.0 + (index != best)}) for index in range(3)}
    standing = arm_standing(arm, records, eta=2)
    assert standing.best is not None
    assert standing.on_edge("optimizer.lr") is on_edge


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1e-3, 2e-3, 3e-3], ["Every best value lies inside of what was tried."]),
        (["cosine", "constant", "wsd"], []),
        ([False, True], []),
    ],
)
def test_values_that_are_no_numbers_have_neither_an_edge_nor_an_inside(
    values: list[Any], said: list[str]
) -> None:
    key = "optimizer.lr"
    tried = [Candidate(values={key: value}, runs=(str(place),)) for place, value in enumerate(values)]
    arm = Arm(axes={"schedule": "2bw"}, rungs=(4,), candidates=tuple(tried))
    records = {str(place): record(str(place), {4: 1.0 + abs(place - 1)}) for place in range(len(values))}
    question = Question(template="", changes=(), over=(key,), samples=2, search_seed=None, eta=2, rungs=())
    tuning = Tuning(
        plan=Plan(question=question, keys=(key,), arms=(arm,)), arms=[arm_standing(arm, records, eta=2)]
    )
    assert tuning.remarks[1:] == said
