"""How an arm of a tuning stands: a function of what its runs' folders say, and of nothing else.

Successive halving (Jamieson and Talwalkar, arXiv 1502.07943, algorithm 1), each arm for itself: when all of
its candidates have been evaluated at a rung, the best of them go on to the next. The asynchronous variant
(ASHA, arXiv 1810.05934) promotes before a rung is complete, by what has arrived so far; its result depends on
which run was faster, so it could not be the same after an interruption.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from asyncpp_cli.base.console import command
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.runs.attempts.files import Scheduler
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.experiment_folder import Experiment, whole_template
from asyncpp_cli.runs.status import Cause, State, Status, is_done
from asyncpp_cli.tune.plan import Arm, Candidate, Plan, survivors


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run's folder says."""

    id: str
    status: Status
    saved_step: int | None
    losses: Mapping[int, float]
    """Validation loss by step, nats per token."""

    @property
    def failed(self) -> bool:
        """Whether it ended by its own fault, and would again: it diverged, say, or needs too much memory."""
        return self.status.state == State.FAILED and self.status.cause in (Cause.ERROR, Cause.OUT_OF_MEMORY)

    def reached(self, step: int) -> bool:
        """Whether it was evaluated at a rung, and has saved there: a run may be killed between the two."""
        saved = is_done(self.status, until=step) or (self.saved_step or 0) >= step
        return saved and step in self.losses


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A candidate at the last rung that it was to train to."""

    candidate: Candidate
    step: int
    """Step of the rung."""
    loss: float | None
    """Mean over its runs; infinite if one failed or is not finite; None: not known yet."""
    failed: tuple[RunRecord, ...]
    """Its runs that failed."""
    losses: Mapping[int, float]
    """Mean loss at each rung that all of its runs have reached."""


@dataclass(frozen=True, kw_only=True)
class ArmStanding:
    """How an arm stands."""

    arm: Arm
    candidates: tuple[Compared, ...]
    """In the order of the plan."""
    rung: int
    """Number of the rung that is being trained to, from 0; that of the last one at the end."""
    due: Mapping[str, int]
    """Runs to train now, and the step at which to pause each."""
    best: Compared | None
    """Set when all rungs are complete; None also if every candidate failed."""

    @property
    def leading(self) -> Compared:
        """The best candidate or, until that is known, the one with the lowest loss at the highest rung."""
        known = [each for each in self.candidates if each.losses]
        if self.best is not None or not known:
            return self.best or self.candidates[0]
        # NaN cannot be compared: such a loss comes last.
        return min(known, key=lambda each: (-max(each.losses), _or_infinite(each.losses[max(each.losses)])))

    @property
    def steps(self) -> int:
        """Steps of its runs up to their rungs: what the tuning costs so far, without what is due."""
        done = 0
        for compared in self.candidates:
            before = [step for step in self.arm.rungs if step < compared.step]
            for run in compared.candidate.runs:
                done += (before[-1] if before else 0) if run in self.due else compared.step
        return done

    def tried(self, key: str) -> list[Any]:
        """The candidates' values of a key."""
        return [candidate.values[key] for candidate in self.arm.candidates]

    def on_edge(self, key: str) -> bool:
        """Whether the best value `is_on_edge` of those tried."""
        return self.best is not None and is_on_edge(self.best.candidate.values[key], self.tried(key))


def has_edges(tried: Iterable[Any]) -> bool:
    """Whether these are several numbers."""
    values = set(tried)
    return len(values) > 1 and all(type(each) in (int, float) for each in values)


def is_on_edge(value: Any, tried: Iterable[Any]) -> bool:
    """Whether a value is the smallest or largest of several numbers tried."""
    values = set(tried)
    return has_edges(values) and value in (min(values), max(values))


def standings(experiment: Experiment, plan: Plan, *, scheduler: Scheduler | None) -> list[ArmStanding]:
    """How every arm stands.

    Args:
        experiment: that is tuned.
        plan: its plan.
        scheduler: asked about runs on other machines.

    Raises:
        UserError: a run cannot be compared at its rung any more.
    """
    known = {cell.id for cell in experiment.cells}
    runs = [run for arm in plan.arms for each in arm.candidates for run in each.runs]
    if lost := [run for run in runs if run not in known]:
        raise UserError(
            f"{experiment.folder}: {lost[0]} is no run any more; to make it anew: "
            f"{command('sweep', whole_template(experiment.folder), '--out', experiment.folder)}"
        )
    records = {run: _record(experiment, run, scheduler) for run in runs}
    return [arm_standing(arm, records, eta=plan.question.eta) for arm in plan.arms]


def arm_standing(arm: Arm, records: Mapping[str, RunRecord], *, eta: int) -> ArmStanding:
    """How an arm stands, from what its runs say.

    Of equal candidates the first in the plan goes on. One with a failed run comes last and does not go on.

    Raises:
        UserError: a run has trained beyond its rung without an evaluation there.
    """
    at_last_rung: dict[int, Compared] = {}
    alive = list(range(len(arm.candidates)))
    due: dict[str, int] = {}
    rung = 0
    for rung, step in enumerate(arm.rungs):
        for index in alive:
            of_candidate = [records[run] for run in arm.candidates[index].runs]
            at_last_rung[index] = _compared(arm, index, of_candidate, step=step)
            due |= {each.id: step for each in of_candidate if not (each.failed or each.reached(step))}
        if due:
            break
        alive = _ranked(alive, at_last_rung)
        if rung + 1 < len(arm.rungs):
            alive = alive[: survivors(len(arm.candidates), eta=eta, level=rung + 1)]
        if not alive:
            break
    for run, step in due.items():
        if step not in records[run].losses and (records[run].saved_step or 0) > step:
            raise UserError(
                f"{run} has trained to step {records[run].saved_step} without an evaluation after step "
                f"{step}, where it is compared; `asyncpp remove` it, and sweep its resolved.yaml again"
            )
    return ArmStanding(
        arm=arm,
        candidates=tuple(at_last_rung[index] for index in range(len(arm.candidates))),
        rung=rung,
        due=due,
        best=at_last_rung[alive[0]] if alive and not due else None,
    )


def _compared(arm: Arm, index: int, records: Sequence[RunRecord], *, step: int) -> Compared:
    losses = [each.losses[step] for each in records if each.reached(step)]
    failed = tuple(each for each in records if each.failed and not each.reached(step))
    loss: float | None = None
    if len(losses) + len(failed) == len(records):
        loss = fmean(losses) if not failed and all(map(math.isfinite, losses)) else math.inf
    means = {
        rung: fmean(each.losses[rung] for each in records)
        for rung in arm.rungs
        if rung <= step and all(each.reached(rung) for each in records)
    }
    return Compared(candidate=arm.candidates[index], step=step, loss=loss, failed=failed, losses=means)


def _ranked(alive: Sequence[int], compared: Mapping[int, Compared]) -> list[int]:
    """Those with a finite loss, the best first; equal ones in the order of the plan, at every rung."""
    losses: dict[int, Any] = {index: compared[index].loss for index in alive}
    return sorted(
        (index for index in alive if losses[index] < math.inf), key=lambda index: (losses[index], index)
    )


def _or_infinite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _record(experiment: Experiment, run_id: str, scheduler: Scheduler | None) -> RunRecord:
    run = experiment.run(run_id)
    status = current_status(run, scheduler=scheduler)
    losses = {} if not status.attempt else run.validation_losses()
    return RunRecord(id=run_id, status=status, saved_step=run.saved_step, losses=losses)
