"""The gradient that a pipeline gathers in the first step of a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from stages.checkpoint.initial_broadcast import broadcast_initial_weights
from stages.comm.topology import connect_in_process
from stages.config.run_config import RunConfig
from stages.config.segments import segment_program
from stages.data.dataset import prepare
from stages.liveness.stop_signal import never
from stages.pipeline.build import build_ranks
from stages.pipeline.replay import drive
from stages.shape.head_rows import split_name
from stages.update.balance import LoadTally
from stages.update.optimizer_step import UpdateResult
from stages.weights.flat_buffers import GradientBuffer
from stages.weights.weight_versions import Replica, WeightVersions


class KeepGradient:
    """In the place of an update: keeps the gradient and leaves the weights as they are."""

    tally = LoadTally([], experts=0, device=torch.device("cpu"))

    def __init__(self, weights: WeightVersions) -> None:
        self._weights = weights
        self.kept: dict[str, Tensor] = {}

    def prepare(self, gradient: GradientBuffer) -> None:
        pass

    def clip(self, gradient: GradientBuffer, *, squared: Tensor) -> None:
        pass

    def at_backward(self, replica: Replica, *, mismatch: int) -> AbstractContextManager[None]:
        return nullcontext()

    def apply(
        self, gradient: GradientBuffer, *, version: int, step: int, clip_by: float | None, finite: bool
    ) -> UpdateResult:
        weights = self._weights
        # With several data ranks the sum of each member is on the one that owns it.
        whole = len(weights.owned) == len(weights.member_names)
        names, views = (
            (weights.names, gradient.views) if whole else (weights.master.names, gradient.owned_views)
        )
        self.kept = {name: view.clone() for name, view in zip(names, views, strict=True)}
        biases = self._weights.newest().biases
        with self._weights.overwriting_oldest(version=version, biases=biases) as replica:
            torch._foreach_copy_(list(replica), list(self._weights.master.parameters))
        return UpdateResult(lr=0.0, grad_norm=None, skipped=False)


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with the rows of the head, perhaps tied to the embedding, together, if it is in shards."""
    rows: dict[int, Tensor] = {}
    whole = {}
    joined_name = "head.weight"
    for name, tensor in tensors.items():
        own_name, held = split_name(name)
        if held is None:
            whole[name] = tensor
        else:
            assert len(held) == len(tensor)
            rows[held.start] = tensor
            joined_name = own_name
    return whole | ({joined_name: torch.cat([rows[start] for start in sorted(rows)])} if rows else {})


def first_gradient(config: RunConfig) -> dict[str, Tensor]:
    """The gradient of the run's first step, gathered by the pipeline and summed over its data ranks."""
    program = segment_program(config, first_step=0, steps=1)
    ranks = build_ranks(
        config,
        connections=connect_in_process(rank_of_stage=program.rank_of_stage, data_ranks=config.parallel.data),
        corpus=prepare(config.data),
        device=torch.device("cpu"),
        on_step=lambda result: None,
        stop=never,
    )
    keepers = []
    for rank in ranks:
        for stage, state in rank.stages.items():
            keeper = KeepGradient(state.weights)
            keepers.append(keeper)
            rank.stages[stage] = replace(state, update=keeper)
    broadcast_initial_weights(ranks, in_process=True)
    drive([rank.executor.run(program) for rank in ranks])
    return {name: gradient for keeper in keepers for name, gradient in keeper.kept.items()}
