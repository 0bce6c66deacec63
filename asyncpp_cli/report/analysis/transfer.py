"""A measured ratio of steps carried over to a planned run of another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import schedules
from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.cells import DEFAULT_GPU, planned_machine
from asyncpp_cli.planner.decision import KINDS, Best, best_layouts, faster, sharded_best
from asyncpp_cli.planner.layouts import CONSIDERED
from asyncpp_cli.planner.shared import Shared
from asyncpp_cli.report.analysis.verdict import EXAMPLE, UNDECIDED, Verdict, answer_of


@dataclass(frozen=True, kw_only=True)
class Target:
    """What `asyncpp report --for` plans."""

    model: str
    gpus: int
    tokens_per_step: int | None = None
    """None: those of `asyncpp plan`."""
    device: str = DEFAULT_GPU


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A verdict whose speed is planned for another run."""

    verdict: Verdict
    target: Target
    tokens_per_step: int
    synchronous: Best | None
    """None, as for `delayed`: no layout fits."""
    delayed: Best | None

    @property
    def speed(self) -> float | None:
        """Tokens per second of the best delayed layout over those of the best synchronous one."""
        if self.synchronous is None or self.delayed is None:
            return None
        return self.synchronous.seconds / self.delayed.seconds

    @property
    def times(self) -> tuple[float, float | None, float | None] | None:
        """Time over the synchronous time, with the interval of the steps; None without a speed."""
        steps, speed = self.verdict.steps, self.speed
        if steps is None or speed is None:
            return None
        low, high = (None if bound is None else bound / speed for bound in (steps.low, steps.high))
        return steps.ratio / speed, low, high

    @property
    def answer(self) -> str:
        """`pays`, `does not pay` or `undecided`, if the steps are the same at the size of the target."""
        if self.times is None:
            return UNDECIDED
        _, low, high = self.times
        return answer_of(low, high)

    @property
    def where(self) -> str:
        """What is planned."""
        of = f"{self.target.model} on {self.target.gpus:,} GPUs"
        return f"Planned for {of} ({self.target.device}, {self.tokens_per_step:,} tokens per step)"

    @property
    def sentence(self) -> str:
        """The transfer in one or two sentences."""
        steps = self.verdict.steps
        if steps is None or self.verdict.delayed.synchronous:
            return f"{self.where}: {self.verdict.delayed_name} has no ratio of steps to carry over."
        if self.times is None or self.speed is None or self.synchronous is None or self.delayed is None:
            missing = "synchronous" if self.synchronous is None else "delay 1"
            return f"{self.where}: no layout of kind {missing!r} fits."
        time, low, high = self.times
        ends = f"{_bound(low)} to {_bound(high)}"
        measured = self.verdict.delayed.model
        where = "" if measured == self.target.model else f" at another size, {measured}"
        return (
            f"{self.where}: {self.answer}: {time:.2f} ({ends}) of the time of the best synchronous "
            f"layout, {self.synchronous.layout.place}, under {self.delayed.layout.place}: "
            f"{steps.ratio:.2f} times the tokens, {self.speed:.2f} times as many per second. "
            f"The speed is planned; the steps of {self.verdict.delayed_name} were measured{where}."
        )

    def record(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        times = self.times
        return {
            "model": self.target.model,
            "gpus": self.target.gpus,
            "tokens_per_step": self.tokens_per_step,
            "device": self.target.device,
            "answer": self.answer,
            "sentence": self.sentence,
            "time_ratio": None if times is None else times[0],
            "time_interval": None if times is None else list(times[1:]),
            "speed_ratio": self.speed,
            "steps_measured_at": self.verdict.delayed.model,
        }


def transfer_lines(found: Sequence[Transfer]) -> list[str]:
    """The transfers in sentences, those that have a ratio of steps; one line if none has."""
    carried = [each.sentence for each in found if each.verdict.steps is not None]
    if carried or not found:
        return carried
    return [f"{found[0].where}: no arm of these runs has a ratio of steps to carry over. {EXAMPLE}"]


def transfers(found: Sequence[Verdict], target: Target) -> list[Transfer]:
    """The verdicts on arms at a delay of 1, each with the speed that is planned for the target.

    Raises:
        UserError: there is no such model or device, or no layout of so many GPUs and tokens.
    """

    @cache
    def planned(optimizer: str, delayed: tuple[str, ...]) -> tuple[int, Best | None, Best | None]:
        base = base_of(target.model, [f"optimizer={optimizer}"])
        tokens = target.tokens_per_step or base.tokens_per_step
        machine = planned_machine(base.config, device=target.device)
        assert machine.limit_gb is not None  # of a GPU that is named
        run: dict[str, Any] = {
            "gpus": target.gpus,
            "tokens_per_step": tokens,
            "costs": machine.costs,
            "limit_gb": machine.limit_gb,
        }
        names = [name for name in CONSIDERED if schedules.is_synchronous(name)] + list(delayed)
        piped = {key: value for key, value in run.items() if key != "costs"}
        best = best_layouts(machine.config, Shared(machine.costs), names=names, **piped)
        sharded = sharded_best(machine.config, **run)
        return tokens, faster(best[KINDS[0]], sharded), best[KINDS[1]]

    carried = []
    for verdict in found:
        if verdict.delayed.synchronous or verdict.delayed.delay not in (1, None):
            continue
        tokens, synchronous, delayed = planned(verdict.delayed.optimizer, _alike(verdict.delayed.schedule))
        carried.append(
            Transfer(
                verdict=verdict,
                target=target,
                tokens_per_step=tokens,
                synchronous=synchronous,
                delayed=delayed,
            )
        )
    return carried


def _alike(name: str) -> tuple[str, ...]:
    """Schedules whose weights are those of schedule `name`, at the same delay."""
    if name not in schedules.FAMILY or not schedules.find(name).updates_together:
        return (name,)
    return tuple(
        other
        for other in CONSIDERED
        if not schedules.is_synchronous(other) and schedules.find(other).updates_together
    )


def _bound(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"
