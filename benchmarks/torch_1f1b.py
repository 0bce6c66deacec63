"""torch's own Schedule1F1B, as an arm beside ours."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from real_stage import real_config, real_stage
from sleeping_stage import SHAPE, SleepingStage
from torch import nn

from stages.comm.process import Process
from stages.data.batches import Batches
from stages.data.dataset import prepare
from stages.model.head_loss import next_token_loss


def torchs(process: Process, options: argparse.Namespace, *, steps: int) -> Callable[[], float]:
    """So many steps of torch's Schedule1F1B (with `--real`, and an SGD step): seconds per step."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    # torch's pipeline wants a group of all processes; ours has none.
    dist.init_process_group("gloo", store=process.store, rank=process.rank, world_size=process.size)  # noqa: TID251
    first, last = process.rank == 0, process.rank == process.size - 1
    count = options.microbatches
    if options.real:
        module: nn.Module = real_stage(process, options)
        config = real_config(options, "1f1b")
        data = Batches(config, prepare(config.data), device=process.device)
        tokens = torch.cat([data.tokens(number) for number in range(count)])
        targets = torch.cat([data.targets(number) for number in range(count)])
        activation = torch.zeros((options.batch, options.context, options.width), requires_grad=True)
        given = data.tokens(0) if first else activation
        out = torch.zeros((options.batch, options.context, 256), requires_grad=True) if last else activation
    else:
        module = SleepingStage(options.forward_ms / 1e3, data=1)
        activation = torch.zeros(SHAPE, requires_grad=True)
        tokens = torch.zeros((count, *SHAPE[1:]), requires_grad=True)
        targets = torch.zeros((count, SHAPE[1]), dtype=torch.long)
        given = out = activation
    stage = PipelineStage(
        module,
        process.rank,
        process.size,
        process.device,
        input_args=(given,),
        output_args=(out,),
        group=dist.group.WORLD,
    )
    schedule = Schedule1F1B(stage, n_microbatches=count, loss_fn=next_token_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)

    def step() -> None:
        if first:
            schedule.step(tokens)
        elif last:
            schedule.step(target=targets)
        else:
            schedule.step()
        if options.real:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    def segment() -> float:
        step()
        started = time.perf_counter()
        for _ in range(steps - 1):
            step()
        return (time.perf_counter() - started) / (steps - 1)

    return segment
