"""Real processes over gloo: against replay bit for bit, and against torch's own pipeline schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.small_runs import Rows, in_processes, replayed, small_config, with_experts
from support.training_cases import cases, check_processes_are_replays
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from schedules.deadlock import UNACKNOWLEDGED, sends_in_flight
from stages.comm.process import Process
from stages.config.run_config import RunConfig
from stages.config.segments import segment_program
from stages.data.batches import Batches
from stages.data.dataset import prepare
from stages.model.decoder import Stage, initialise
from stages.model.head_loss import next_token_loss
from stages.resolve.facts import facts
from stages.shape.partition import cut_model
from stages.trainer import replay

pytestmark = pytest.mark.slow


def test_runs_of_two_processes_are_their_replays_bit_for_bit() -> None:
    narrow: dict[str, Any] = {"precision": "bfloat16", "microbatches": 4}
    # The second rank sends all of a chunk before the first takes one: with eight on the way both waited.
    many = small_config("looped-bfs", microbatches=24, steps=2)
    assert sends_in_flight(segment_program(many, first_step=0, steps=2)) > UNACKNOWLEDGED
    check_processes_are_replays(
        [
            *cases(stages=2, experts_at=0, other=True),
            many,
            small_config("2bw", **narrow),
            with_experts(small_config("zero-bubble", **narrow)),
            *(small_config(name, shard_head=True, vocab_size=301, **narrow) for name in ("1f1b", "2bw")),
            *(
                small_config(name, shard_head=True, family="tied", split=name == "2bw-v", microbatches=4)
                for name in ("zb-v", "2bw-v")
            ),
            small_config("2bw-v", family="tied", microbatches=4, optimizer="muon", coefficient=1.0),
            small_config("2bw-v", family="tied", split=True, **narrow),
            *(small_config(name, family="tied", stages=1, data=2) for name in ("2bw-v", "zb-v")),
            small_config("2bw", ema_decay=0.8, coefficient=1.0, **narrow),
            small_config("1f1b", ema_decay=0.8, stages=1, data=2, optimizer="muon"),
            small_config("paci", ema_decay=0.8),
        ],
        size=2,
    )


def test_runs_of_three_processes_are_their_replays_bit_for_bit() -> None:
    """With documents, too, of which the process in the middle computes neither tokens nor losses."""
    common: dict[str, Any] = {"stages": 3, "microbatches": 6}
    within: dict[str, Any] = common | {"documents": True, "layers": 6}
    # As few micro-batches as it can have: the update is due as soon as its gradient is there.
    further, usual = (
        small_config("2bw", stages=3, microbatches=4, ahead=ahead, coefficient=1.0, steps=6)
        for ahead in (2, 1)
    )
    ahead, *_ = check_processes_are_replays(
        [
            further,
            *cases(stages=3, experts_at=1),
            small_config("2bw", precision="bfloat16", **common),
            with_experts(small_config("zero-bubble", precision="bfloat16", **common)),
            *(
                small_config(name, split=name == "2bw-v", **within)
                for name in ("1f1b", "zero-bubble", "paci", "2bw-v")
            ),
            small_config("2bw", family="experts", recompute="selective", **within),
            small_config("1f1b", precision="bfloat16", recompute="full", **within),
        ],
        size=3,
    )
    assert ahead[-1]["weights_sha256"] == replayed(usual).digest
    assert next(row for row in ahead if row["kind"] == "segment")["memory"]["in_flight"] == [5, 3, 1]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("optimizer", "coefficient"), [("adamw", 1.0), ("muon", 0.0)])
def test_the_v_trains_as_2bw_does_on_the_same_stages(split: bool, optimizer: str, coefficient: float) -> None:
    settings: dict[str, Any] = {"steps": 6, "optimizer": optimizer, "coefficient": coefficient}
    folded, of_2bw = (
        replay(small_config(schedule, microbatches=4, **options, **settings), recorder=Rows())
        for schedule, options in (("2bw-v", {"split": split}), ("2bw", {"stages": 4}))
    )
    assert len(folded.train_losses) == 6
    assert folded.train_losses == pytest.approx(of_2bw.train_losses, rel=1e-6)


def torch_losses(process: Process, config: RunConfig) -> list[float]:
    """Losses of the micro-batches of step 0 by torch's schedule of the same name."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=process.store, rank=process.rank, world_size=process.size)
    context = config.data.context
    cut = cut_model(config.model, stages=process.size, context=context)[process.rank]
    module = Stage(config.model, cut, context=context).double()
    module.prepare(device=process.device, dtype=torch.float64)
    for name, parameter in module.named_parameters():
        initialise(parameter, name=name, seed=config.seed, model=config.model)
    data = Batches(config, prepare(config.data), device=process.device)
    count = config.schedule.microbatches
    tokens = torch.cat([data.tokens(number) for number in range(count)])
    targets = torch.cat([data.targets(number) for number in range(count)])
    first, last = process.rank == 0, process.rank == process.size - 1
    activation = torch.zeros(facts(config).activation_shape, dtype=torch.float64, requires_grad=True)
    logits = torch.zeros(
        (*activation.shape[:2], config.model.vocab_size), dtype=torch.float64, requires_grad=True
    )
    stage = PipelineStage(
        module,
        process.rank,
        process.size,
        process.device,
        input_args=(data.tokens(0),) if first else (activation,),
        output_args=(logits,) if last else (activation,),
        group=dist.group.WORLD,
    )
    schedules = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
    schedule = schedules[config.schedule.name](stage, n_microbatches=count, loss_fn=next_token_loss)
    losses: list[torch.Tensor] = []
    if first:
        schedule.step(tokens)
    elif last:
        schedule.step(target=targets, losses=losses)
    else:
        schedule.step()
    return [float(loss.detach()) for loss in losses]


@pytest.mark.filterwarnings("ignore")
def test_losses_are_those_of_torch_pipelining() -> None:
    configs = [small_config(name, microbatches=4, steps=1, precision="float64") for name in ("1f1b", "gpipe")]
    by_rank = in_processes(torch_losses, configs, size=2)
    for config, losses in zip(configs, by_rank[-1], strict=True):
        assert len(losses) == 4
        ours = replay(config, recorder=Rows()).train_losses
        assert ours == pytest.approx([sum(losses) / 4], rel=1e-12)
