"""The pace of micro-batches in a pipeline that is never flushed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import schedules
from asyncpp_cli.planner.programs import OfRanks, Shape
from asyncpp_cli.planner.stage_times import StageTimes, costs_of
from asyncpp_cli.planner.steady_state import SteadyState
from schedules import Op
from schedules.costs import Costs
from schedules.head_shards import further_ahead
from schedules.step_time import step_graph_of
from stages.memory.estimate import Course
from stages.memory.in_flight import in_flight


class Pace(OfRanks):
    """How fast micro-batches follow each other in a pipeline that is never flushed, however many a step has:
    its ranks perform the same forwards and backwards for one after another, whatever lies between. They hold
    as many of them, too: a lower bound of their memory, without updates and shards of the head."""

    @staticmethod
    def shape_of(shape: Shape) -> Shape:
        """What of a shape the pace depends on: not on when its weights are updated."""
        options = tuple(each for each in shape.options if each[0] not in ("delay", "update_interval"))
        return shape._replace(microbatches=0, options=options, tied=False)

    def __init__(self, shape: Shape) -> None:
        self.shape = shape = self.shape_of(shape)
        lead = dict(shape.options).get("ahead", 1) * shape.stages + shape.shard_head

        def without_updates(microbatches: int) -> schedules.Program:
            """A program of as many steps of one micro-batch each, without shards of the head, which leave
            forwards and backwards in their order."""
            program = shape._replace(shard_head=False, microbatches=microbatches).build(1)
            in_order = further_ahead if shape.shard_head else tuple
            return replace(
                program,
                microbatches=1,
                update_interval=1,
                updates_together=False,
                steps=microbatches,
                actions=tuple(
                    tuple(action for action in in_order(actions) if action.op is not Op.UPDATE)
                    for actions in program.actions
                ),
            )

        graph, program = step_graph_of(without_updates, steps=2 * lead + 4)
        super().__init__(program)
        self._steady = SteadyState(graph)
        self._found: dict[Costs, float] = {}
        counts, moments = in_flight(program)
        self.course = Course(
            versions=(1,) * program.num_stages,
            mismatch=(0,) * program.num_stages,
            in_flight=tuple(map(frozenset, counts)),
            moments=tuple(moments),
        )
        """What its memory depends on: one version of the weights, and the micro-batches in flight."""

    def buffers(self, *, data_ranks: int, on_gpu: bool) -> Sequence[int]:
        """Gradient buffers of each stage, at least, whatever the arguments."""
        return (1,) * self.program.num_stages

    def seconds(self, times: StageTimes) -> float:
        """Seconds of a micro-batch, at least."""
        of_blocks = {
            field.name: getattr(times, field.name)[: self.program.num_stages] for field in fields(times)
        }
        none = dict.fromkeys(("update", "reduction"), (0.0,) * self.program.num_stages)
        of_shards: dict[str, Any] = dict.fromkeys(("head", "head_weight", "embed", "embed_weight"), ())
        costs = costs_of(StageTimes(**of_blocks | of_shards | none))
        if costs not in self._found:
            self._found[costs] = self._steady.seconds(costs)
        return self._found[costs]
