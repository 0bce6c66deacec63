"""Real processes over gloo: against replay bit for bit, and against torch's own pipeline schedules."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.small_runs import Rows, in_processes, small_config, with_experts
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
from stages.pipeline.build import activation_shape
from stages.shape.partition import cut_model
from stages.trainer import replay


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.slow
def test_a_distributed_run_is_its_replay_bit_for_bit(stages: int) -> None:
    narrow = [
        small_config(schedule, stages=stages, microbatches=stages, precision="bfloat16")
        for schedule in ("2bw", "zero-bubble")
    ]
    chosen = cases(stages=stages, experts_at=stages % 2, one_each=stages == 3)
    configs = [*chosen, narrow[0], with_experts(narrow[1])]
    check_processes_are_replays(configs, size=stages)


@pytest.mark.slow
def test_running_further_ahead_computes_the_same_weights() -> None:
    # As few micro-batches as it can have: the update is due as soon as its gradient is there.
    usual, further = (
        small_config("2bw", stages=3, microbatches=4, ahead=ahead, coefficient=1.0, steps=6)
        for ahead in (1, 2)
    )
    [distributed] = check_processes_are_replays([further], size=3)
    replay(usual, recorder=(of_usual := Rows()))
    assert distributed[-1]["weights_sha256"] == of_usual.rows[-1]["weights_sha256"]
    [segment, *_] = [row for row in distributed if row["kind"] == "segment"]
    assert segment["memory"]["in_flight"] == [5, 3, 1]


@pytest.mark.slow
def test_a_chunk_of_more_microbatches_than_usually_wait_to_be_received_ends() -> None:
    """The second rank sends all of a chunk before the first takes one: with eight on the way both waited."""
    config = small_config("looped-bfs", stages=2, chunks=2, microbatches=24, steps=2)
    assert sends_in_flight(segment_program(config, first_step=0, steps=2)) > UNACKNOWLEDGED
    check_processes_are_replays([config], size=2)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("optimizer", "coefficient"), [("adamw", 1.0), ("muon", 0.0)])
def test_the_v_trains_as_2bw_does_on_the_same_stages(split: bool, optimizer: str, coefficient: float) -> None:
    common = {"microbatches": 4, "layers": 4, "steps": 6, "optimizer": optimizer, "coefficient": coefficient}
    rows, of_2bw = Rows(), Rows()
    replay(small_config("2bw-v", stages=2, split=split, **common), recorder=rows)
    replay(small_config("2bw", stages=4, **common), recorder=of_2bw)
    losses, expected = (
        torch.tensor([row["train_loss"] for row in run.rows if row["kind"] == "step"])
        for run in (rows, of_2bw)
    )
    assert len(losses) == 6
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)


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
    activation = torch.zeros(activation_shape(config), dtype=torch.float64, requires_grad=True)
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
@pytest.mark.slow
def test_losses_are_those_of_torch_pipelining() -> None:
    configs = [
        small_config(name, stages=2, microbatches=4, steps=1, precision="float64")
        for name in ("1f1b", "gpipe")
    ]
    by_rank = in_processes(torch_losses, configs, size=2)
    for config, losses in zip(configs, by_rank[-1], strict=True):
        assert len(losses) == 4
        ours = replay(config, recorder=Rows()).train_losses
        assert ours == pytest.approx([sum(losses) / 4], rel=1e-12)
