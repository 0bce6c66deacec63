"""A small decoder whose stages a benchmark of the pipeline computes for real."""

from __future__ import annotations

import argparse

import torch

from stages.comm.process import Process
from stages.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from stages.model.decoder import Stage, initialise
from stages.model.partition import StageCut


def real_config(options: argparse.Namespace, schedule: str) -> RunConfig:
    return RunConfig(
        schedule=ScheduleConfig(name=schedule, microbatches=options.microbatches),
        optimizer=OptimizerConfig(name="sgd", lr=1e-4),
        model=ModelConfig(
            name="benchmark",
            layers=2 * options.ranks,
            width=options.width,
            heads=4,
            kv_heads=2,
            mlp_width=3 * options.width,
        ),
        data=DataConfig(context=options.context),
        parallel=ParallelConfig(stages=options.ranks, data=options.data),
        train=TrainConfig(steps=10**6, microbatch_size=options.batch, eval_interval=10**6),
    )


def real_stage(process: Process, options: argparse.Namespace) -> Stage:
    config = real_config(options, "1f1b")
    rank = process.rank // options.data
    cut = StageCut(
        blocks=range(2 * rank, 2 * rank + 2),
        has_embedding=rank == 0,
        has_head=rank == options.ranks - 1,
    )
    module = Stage(config.model, cut, context=options.context)
    module.prepare(device=process.device, dtype=torch.float32)
    for name, parameter in module.named_parameters():
        initialise(parameter, name=name, seed=0, layers=config.model.layers)
    return module
