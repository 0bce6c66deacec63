"""What a rank measures of itself as it runs a segment."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from schedules import Analysis
from schedules.actions import Action, Op
from stages.update import UpdateResult


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One update of the last stage, which is the one that knows the loss."""

    version: int
    train_loss: float
    """Mean over the micro-batches of the update on all data ranks, nats a token."""
    update: UpdateResult
    time: float
    """Clock at which the last backward of the step had been done, seconds."""


@dataclass
class StageTrace:
    """What a stage measured of itself in one segment."""

    delay_min: int | None = None
    delay_max: int | None = None
    mismatch_max: int = 0
    actions: dict[Op, tuple[int, float]] = field(default_factory=dict)
    """How many of each op were performed, and the seconds that they computed, waiting left out."""

    def count(self, op: Op, seconds: float) -> None:
        """One `op` was performed and computed for `seconds`."""
        before, so_far = self.actions.get(op, (0, 0.0))
        self.actions[op] = (before + 1, so_far + seconds)

    def note_delays(self, delays: Sequence[int]) -> None:
        """An update applied gradients that were `delays` updates old."""
        self.delay_min = min(delays if self.delay_min is None else [self.delay_min, *delays])
        self.delay_max = max(delays if self.delay_max is None else [self.delay_max, *delays])


Timed = tuple[Action, float, float]
"""An action, and when its computing began and ended, in seconds of `time.perf_counter`."""


@dataclass
class RankTrace:
    """What a rank measured of itself in one segment."""

    stages: dict[int, StageTrace] = field(default_factory=dict)
    update_times: list[float] = field(default_factory=list)
    """Clock at each update of its last stage, seconds."""
    update_waited: list[float] = field(default_factory=list)
    """Seconds spent waiting up to each of these."""
    waited: float = 0.0
    """Seconds spent waiting for others, in all."""
    gave_up: str | None = None
    """Why the run must not go on after this segment."""
    latest: deque[Timed] = field(default_factory=lambda: deque(maxlen=0))
    """The last actions that were done, as many as the queue holds; an update when it is applied."""
    _waited_in_action: float = 0.0
    """Seconds that the action under way has waited so far."""
    _waited_until: float | None = None
    """Clock when it had waited, seconds; None if it has not."""

    def note_wait(self, began: float, ended: float) -> None:
        """The action under way waited for another rank."""
        self.waited += ended - began
        self._waited_in_action += ended - began
        self._waited_until = ended

    def note_wait_for_update(self, began: float, ended: float) -> None:
        """An action could not begin before an update was done."""
        self.waited += ended - began

    def note_action(self, action: Action, began: float, ended: float) -> None:
        """`action` was performed; all that it waited has been noted. It waits before it computes."""
        if action.op is Op.UPDATE:
            # It may be done while another action is under way, which has waited by itself.
            self.stages[action.stage].count(action.op, ended - began)
            self.latest.append((action, began, ended))
            return
        self.stages[action.stage].count(action.op, ended - began - self._waited_in_action)
        self.latest.append((action, began if self._waited_until is None else self._waited_until, ended))
        self._waited_in_action, self._waited_until = 0.0, None

    def note_update(self, at: float) -> None:
        """The last stage of the rank began an update; all waits before it have been noted."""
        self.update_times.append(at)
        self.update_waited.append(self.waited)

    @property
    def steady_seconds(self) -> float:
        """From the first update to the last: whole steps, without the pipeline's filling and draining."""
        return self.update_times[-1] - self.update_times[0] if len(self.update_times) > 1 else 0.0

    @property
    def busy(self) -> float | None:
        """Share of `steady_seconds` not spent waiting for others; None without two updates."""
        if self.steady_seconds <= 0:
            return None
        return 1 - (self.update_waited[-1] - self.update_waited[0]) / self.steady_seconds


def check_staleness(traces: Iterable[RankTrace], expected: Analysis) -> None:
    """Hold what the stages measured against the program's analysis.

    Raises:
        RuntimeError: a stage's gradients were older or younger than the program says.
    """
    for stage, trace in ((stage, trace) for of_rank in traces for stage, trace in of_rank.stages.items()):
        measured = (trace.delay_min, trace.delay_max, trace.mismatch_max)
        promised = (expected.delay_min[stage], expected.delay_max[stage], expected.mismatch_max[stage])
        if measured != promised:
            raise RuntimeError(
                f"stage {stage}: measured delay (least, most) and mismatch are {measured}, "
                f"the program's are {promised}"
            )
