"""Replays a run, and keeps the gradient of every backward and every weight version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from support.small_runs import ranks_with
from torch import Tensor

from schedules import Op, Program
from stages.comm.topology import connect_in_process
from stages.config.run_config import RunConfig
from stages.config.segments import segment_program
from stages.pipeline.executor import drive
from stages.update.optimizer_step import StageUpdate
from stages.weights.weight_versions import Replica, WeightVersions

Named = dict[str, Tensor]


class Watched:
    """One replayed segment of a run."""

    def __init__(self, config: RunConfig) -> None:
        torch.set_num_threads(config.site.threads)
        self.program: Program = segment_program(config, first_step=0, steps=config.train.steps)
        self.versions: list[dict[int, Named]] = []
        """Copies of each stage's weights, by version."""
        self.gradients: list[list[Named]] = []
        """For each stage, the gradient of each backward, in the order of micro-batches."""
        ranks = ranks_with(config, connect_in_process(rank_of_stage=self.program.rank_of_stage, data_ranks=1))
        self.batches = ranks[0].batches
        for rank in ranks:
            for stage, state in sorted(rank.stages.items()):
                assert stage == len(self.versions)
                watching = _WatchedUpdate(state.weights, state.update)
                self.versions.append(watching.versions)
                self.gradients.append(watching.gradients)
                rank.stages[stage] = replace(state, update=watching)
        drive([rank.executor.run(self.program) for rank in ranks])

    def read(self, op: Op, microbatch: int, *, older: int = 0) -> Named:
        """Weights of all stages that the program reads in this action, or `older` versions before them."""
        named: Named = {}
        for action in self.program.all_actions():
            if action.op is op and action.microbatch == microbatch:
                named |= self.versions[action.stage][max(0, action.version - older)]
        return named

    def gradient(self, microbatch: int) -> Named:
        """The pipeline's gradient of one micro-batch's own loss."""
        interval = self.program.update_interval
        return {
            name: tensor * interval
            for stage_gradients in self.gradients
            for name, tensor in stage_gradients[microbatch].items()
        }


class _WatchedUpdate:
    """Wraps a stage's update, and records its gradients and weights."""

    def __init__(self, weights: WeightVersions, update: StageUpdate) -> None:
        self._weights = weights
        self._update = update
        self.versions: dict[int, Named] = {}
        self.gradients: list[Named] = []
        self._keep(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._update, name)

    def _keep(self, version: int) -> None:
        held = self._weights.replica_of(version).parameters
        self.versions[version] = dict(
            zip(self._weights.names, [tensor.detach().clone() for tensor in held], strict=True)
        )

    @contextmanager
    def at_backward(self, replica: Replica, *, mismatch: int) -> Iterator[None]:
        buffer = self._weights.gradient_buffer
        before = buffer.flat.clone()
        buffer.flat.zero_()
        with self._update.at_backward(replica, mismatch=mismatch):
            yield
        views = [view.clone() for view in buffer.views]
        self.gradients.append(dict(zip(self._weights.names, views, strict=True)))
        buffer.flat.add_(before)

    def apply(self, *args: Any, version: int, **kwargs: Any) -> Any:
        result = self._update.apply(*args, version=version, **kwargs)
        self._keep(version)
        return result
