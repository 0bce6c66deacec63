"""Builds a run from its configuration: segments, and each rank's stages and executor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from optimizers import is_custom, method_named
from stages.comm.topology import Connection
from stages.config.run_config import RunConfig
from stages.data.batches import Batches
from stages.data.dataset import Corpus
from stages.model.compiler import compiles_here, is_compiled, missing_for_compile
from stages.model.runner import block_runner
from stages.pipeline.executor import RankExecutor
from stages.resolve.facts import Resolved
from stages.shape.families import parameter_roles
from stages.update.clock import clock_of
from stages.update.optimizer_step import StageState, StageUpdate
from stages.update.rank_stats import StepResult
from stages.update.update_phases import UpdateContext, UpdateRules
from stages.update.update_stream import OneStream, streams_of
from stages.weights.tied_head import TiedHead
from stages.weights.weight_versions import WeightVersions


@dataclass(frozen=True)
class Rank:
    """One rank, ready to run."""

    connection: Connection
    stages: dict[int, StageState]
    batches: Batches
    executor: RankExecutor

    @property
    def number(self) -> int:
        """Rank in its pipeline."""
        return self.connection.rank


def build_ranks(
    run: Resolved,
    *,
    connections: Sequence[Connection],
    corpus: Corpus,
    device: torch.device,
    on_step: Callable[[StepResult], None],
    stop: Callable[[], bool],
) -> list[Rank]:
    """The ranks that this process performs, with their stages' weights and executors.

    Args:
        run: to build.
        connections: of these ranks to the others.
        corpus: the training text.
        device: computes everything.
        on_step: called at each update of the last stage, in the process that holds that of data rank 0.
        stop: whether a stop has been requested.

    Raises:
        RuntimeError: the run wants compiled blocks, and this machine cannot compile.
    """
    config = run.config
    compiled = compiles_here(config, device=device.type)
    if not compiled and is_compiled(config, device=device.type):
        print(f"note: blocks are not compiled: {missing_for_compile(device=device.type)}", file=sys.stderr)
    run_block = block_runner(
        config.model,
        recompute=config.train.recompute,
        compiled=compiled,
        sharded=connections[0].sharding is not None,
    )
    rules = UpdateRules(
        clip=config.train.clip,
        common_step=run.schedule.updates_together,
        max_skipped=config.train.max_skipped,
    )
    built = []
    for connection in connections:
        data = connection.data
        stages = {
            stage: _stage_state(run, stage, connection, device=device)
            for stage, holder in enumerate(run.rank_of_stage)
            if holder == connection.rank
        }
        for stage, state in stages.items():
            for replica in state.weights.replicas:
                replica.module.run_block = run_block
            if config.model.tied and run.cuts[stage].has_head and not run.cuts[stage].has_embedding:
                state.tied = TiedHead(state.weights, embedding=stages[0].weights)
        batches = Batches(config, corpus, device=device, data_rank=data.rank, data_ranks=data.size)
        context = UpdateContext(
            stages=stages,
            connection=connection,
            rules=rules,
            clock=clock_of(device),
            # Data rank 0 reports an update for all of them.
            on_step=on_step if data.rank == 0 else lambda result: None,
            stop=stop,
        )
        # Ranks that take turns in one process hand tensors to each other without events, so all work runs in
        # the order of the calls.
        streams = streams_of(device) if connection.links.waits else OneStream()
        executor = RankExecutor(context, batches=batches, streams=streams)
        built.append(Rank(connection=connection, stages=stages, batches=batches, executor=executor))
    return built


def _stage_state(run: Resolved, stage: int, connection: Connection, *, device: torch.device) -> StageState:
    """The weights of a stage with their initial values, and what updates them."""
    config, staleness = run.config, run.staleness
    weights: WeightVersions
    if connection.sharding is not None:
        # torch imports sympy with it: seconds in every process.
        from stages.weights.sharded_weights import ShardedWeights

        weights = ShardedWeights(
            config,
            run.cuts[stage],
            in_place=partial(updated_by_value, config),
            sharding=connection.sharding,
            device=device,
        )
    else:
        weights = WeightVersions(
            config,
            run.cuts[stage],
            replicas=staleness.versions[stage],
            gradient_buffers=run.gradient_buffers(on_gpu=device.type == "cuda")[stage],
            device=device,
            data_rank=connection.data.rank,
            data_ranks=connection.data.size,
        )
    mismatch = staleness.mismatch_max[stage]
    update = StageUpdate(config, weights, stage=stage, delays=staleness.delay_max, mismatch=mismatch)
    return StageState(weights=weights, update=update)


def updated_by_value(config: RunConfig, name: str, dimensions: int) -> bool:
    """Whether the optimizer updates a parameter value by value, so that rows of it can be updated alone.

    Args:
        config: of the run.
        name: of the parameter.
        dimensions: of its shape.
    """
    if is_custom(config.optimizer.name):
        return False
    role = parameter_roles(config.model, {name: dimensions})[name]
    return method_named(config.optimizer.name).rule(role).elementwise
