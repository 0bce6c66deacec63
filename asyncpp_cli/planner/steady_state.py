"""The time of a step in the middle of a program, asked again and again for other times of its stages."""

from __future__ import annotations

from collections.abc import Sequence

from schedules.costs import Costs
from schedules.step_time import StepGraph


class SteadyState:
    """A program's graph, and the cycle that was longest last: a search for the longest begins there."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._policy: Sequence[int] = ()

    def seconds(self, costs: Costs) -> float:
        """Seconds of a step."""
        found = self._graph.step_time(costs, policy=self._policy)
        self._policy = found.policy
        return found.seconds

    def least_seconds(self, costs: Costs) -> float:
        """A lower bound of `seconds`, which has been asked for other costs before: what the cycle that was
        longest then takes now. It is found sooner."""
        return self._graph.least_seconds(costs, policy=self._policy)
