"""A measured ratio of steps carried over to a planned run of another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from asyncpp_cli.report.analysis.further_runs import EXAMPLE
from asyncpp_cli.report.analysis.verdict import UNDECIDED, Verdict, answer_of

if TYPE_CHECKING:
    from asyncpp_cli.planner.listing import Layout


@dataclass(frozen=True, kw_only=True)
class Target:
    """What `asyncpp report --for` plans."""

    model: str
    """A model's name or file, or an experiment template's; in a `Transfer` the model's name."""
    gpus: int
    tokens_per_step: int | None = None
    """None: those of `asyncpp plan`."""
    device: str | None
    """None: as in `asyncpp plan`."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A verdict whose speed is planned for another run."""

    verdict: Verdict
    target: Target
    synchronous: Layout | None
    """None, as for `delayed`: no layout fits."""
    delayed: Layout | None

    @property
    def speed(self) -> float | None:
        """Tokens per second of the best delayed layout over those of the best synchronous one."""
        if self.synchronous is None or self.delayed is None:
            return None
        return self.synchronous.step.seconds / self.delayed.step.seconds

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
        return f"Planned for {of} ({self.target.device}, {self.target.tokens_per_step:,} tokens per step)"

    @property
    def sentence(self) -> str:
        """The transfer in one or two sentences."""
        steps = self.verdict.steps
        if steps is None or self.verdict.delayed.synchronous:
            return f"{self.where}: {self.verdict.delayed.arm} has no ratio of steps to carry over."
        if self.times is None or self.speed is None or self.synchronous is None or self.delayed is None:
            missing = "synchronous" if self.synchronous is None else "delay 1"
            return f"{self.where}: no layout of kind {missing!r} fits."
        time, low, high = self.times
        ends = f"{_bound(low)} to {_bound(high)}"
        measured = self.verdict.delayed.model
        where = "" if measured == self.target.model else f" at another size, {measured}"
        return (
            f"{self.where}: {self.answer}: {time:.2f} ({ends}) of the time of the best synchronous "
            f"layout, {self.synchronous.place}, under {self.delayed.place}: "
            f"{steps.ratio:.2f} times the tokens, {self.speed:.2f} times as many per second. "
            f"The speed is planned; the steps of {self.verdict.delayed.arm} were measured{where}."
        )

    def record(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        times = self.times
        return {
            **asdict(self.target),
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


def _bound(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"
