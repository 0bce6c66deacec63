"""Measurements of a rank as it runs a segment."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field

from schedules import Analysis
from schedules.actions import Action, Op
from stages.update.balance import BlockLoad
from stages.update.optimizer_step import UpdateResult


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One update of the last stage, where the loss is computed."""

    version: int
    train_loss: float
    """Mean over the micro-batches of the update on all data ranks, nats a token."""
    update: UpdateResult
    time: float
    """When the last backward of the step was done, in seconds of `time.perf_counter`."""


@dataclass
class StageTrace:
    """Measurements of a stage in one segment."""

    delay_min: int | None = None
    delay_max: int | None = None
    mismatch_max: int = 0
    actions: dict[Op, tuple[int, float]] = field(default_factory=dict)
    """For each op, how many were performed, and their seconds of computing without waiting."""

    def count(self, op: Op, seconds: float) -> None:
        """Count one `op`, which computed for `seconds`."""
        before, so_far = self.actions.get(op, (0, 0.0))
        self.actions[op] = (before + 1, so_far + seconds)

    def note_delays(self, delays: Sequence[int]) -> None:
        """Record the delays, in updates, of the gradients of one update."""
        self.delay_min = min(delays if self.delay_min is None else [self.delay_min, *delays])
        self.delay_max = max(delays if self.delay_max is None else [self.delay_max, *delays])


Timed = tuple[Action, float, float]
"""An action, and the start and end of its computing, in seconds of `time.perf_counter`."""


@dataclass
class RankTrace:
    """Measurements of a rank in one segment."""

    stages: dict[int, StageTrace] = field(default_factory=dict)
    update_times: list[float] = field(default_factory=list)
    """Time of each update of its last stage, seconds."""
    update_waited: list[float] = field(default_factory=list)
    """Seconds of waiting up to each of these."""
    waited: float = 0.0
    """Total seconds of waiting for other ranks."""
    knows_waits: bool = True
    """Whether these are all; not on a GPU under a schedule that shards, where torch's streams wait."""
    loads: dict[int, BlockLoad] = field(default_factory=dict)
    """Loads of its blocks of experts, by the block's number in the model, over all data ranks."""
    gave_up: str | None = None
    """Why the run ends after this segment; None: it does not."""
    not_finite: str | None = None
    """Names weights that were not finite when a step was skipped; None: they were."""
    latest: MutableSequence[Timed] = field(default_factory=lambda: deque(maxlen=0))
    """The most recent actions; an update counts when it is applied."""
    _waited_in_action: float = 0.0
    """Seconds that the current action has waited so far."""
    _waited_until: float | None = None
    """When that wait ended, seconds; None: it has not waited."""

    def note_wait(self, began: float, ended: float) -> None:
        """Record that the current action waited for another rank."""
        self.waited += ended - began
        self._waited_in_action += ended - began
        self._waited_until = ended

    def note_exchange(self, began: float, ended: float) -> None:
        """Record that the current action waited for an exchange while it computed."""
        self.waited += ended - began
        self._waited_in_action += ended - began

    def note_wait_for_update(self, began: float, ended: float) -> None:
        """Record that an action could not start before an update was done."""
        self.waited += ended - began

    def note_action(self, action: Action, began: float, ended: float) -> None:
        """Record `action`, after its waits. An action waits before it computes."""
        if action.op is Op.UPDATE:
            # It may be applied during another action, which has its own waits.
            self.stages[action.stage].count(action.op, ended - began)
            self.latest.append((action, began, ended))
            return
        self.stages[action.stage].count(action.op, ended - began - self._waited_in_action)
        self.latest.append((action, began if self._waited_until is None else self._waited_until, ended))
        self._waited_in_action, self._waited_until = 0.0, None

    def note_update(self, at: float) -> None:
        """Record the start of an update of the rank's last stage, after all waits before it."""
        self.update_times.append(at)
        self.update_waited.append(self.waited)

    @property
    def steady_seconds(self) -> float:
        """Seconds from the first update to the last: whole steps, without filling and draining."""
        return self.update_times[-1] - self.update_times[0] if len(self.update_times) > 1 else 0.0

    @property
    def busy(self) -> float | None:
        """Share of `steady_seconds` without waiting for other ranks; None with fewer than two updates."""
        if self.steady_seconds <= 0 or not self.knows_waits:
            return None
        return 1 - (self.update_waited[-1] - self.update_waited[0]) / self.steady_seconds

    @property
    def compute_seconds(self) -> float | None:
        """Mean seconds of computing for a micro-batch, updates not counted; None without a forward."""
        forwards = (trace.actions.get(Op.FORWARD, (0, 0.0))[0] for trace in self.stages.values())
        microbatches = max(forwards, default=0)
        computed = sum(
            seconds
            for trace in self.stages.values()
            for op, (_, seconds) in trace.actions.items()
            if op is not Op.UPDATE
        )
        return computed / microbatches if microbatches else None


def staleness_problem(traces: Iterable[RankTrace], expected: Analysis) -> str | None:
    """Describes the first stage whose measured delays differ from the program's; None: there is none."""
    for stage, trace in (
        (stage, trace) for rank_trace in traces for stage, trace in rank_trace.stages.items()
    ):
        measured = (trace.delay_min, trace.delay_max, trace.mismatch_max)
        promised = (expected.delay_min[stage], expected.delay_max[stage], expected.mismatch_max[stage])
        if measured != promised:
            return (
                f"stage {stage}: measured delay (least, most) and mismatch are {measured}, "
                f"the program's are {promised}"
            )
    return None
