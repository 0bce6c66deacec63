"""A head that shares the embedding's matrix: against one process, and against the same run untied."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resumed import go_back, replay_twice, saving
from support.single_process import (
    batches,
    check_against_one_process,
    check_first_gradient,
    step_gradient,
    whole_model,
)
from support.small_runs import Rows, small_config
from support.training_cases import check_processes_are_replays

from optimizers.grouping import Role
from schedules import NAMES, Op, build
from stages.config.run_config import RunConfig
from stages.memory.estimate import course_of, stage_memory
from stages.pipeline.build import representative_programs
from stages.schedule_validation import can_tie, tied_problem
from stages.shape.families import describe
from stages.trainer import replay
from stages.validation import ConfigError, check
from stages.weights.gradient_buffers import gradient_buffers

IN_A_V = [*can_tie(), "2bw-v, split"]


def tied_config(schedule: str, **changed: Any) -> RunConfig:
    name, _, split = schedule.partition(", ")
    options = {"stages": 2, "microbatches": 4, "layers": 5} | changed
    config = small_config(name, split=bool(split), **options)
    config.model.tied = True
    return config


@pytest.mark.parametrize("schedule", NAMES)
def test_a_schedule_declares_whether_its_ends_can_share_a_matrix(schedule: str) -> None:
    program = build(schedule, stages=2, microbatches=4, steps=3)
    assert (tied_problem(program) is None) == (schedule in can_tie())


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        *((schedule, 2) for schedule in IN_A_V),
        ("2bw-v", 1),
        ("zb-v", 1),
        ("1f1b", 1),
        ("zero-bubble", 1),
        ("interleaved-1f1b", 1),
    ],
)
def test_the_gradient_is_the_sum_over_both_uses(schedule: str, stages: int) -> None:
    chunks = 2 if schedule == "interleaved-1f1b" else 1
    config = tied_config(schedule, stages=stages, chunks=chunks, precision="float64")
    untied = replace(config, model=replace(config.model, tied=False))
    reference = whole_model(untied, dtype=torch.float64)
    assert reference.head is not None
    assert reference.embedding is not None
    with torch.no_grad():
        reference.head.weight.copy_(reference.embedding.weight)
    expected, _ = step_gradient(reference, batches(untied), step=0, microbatches=4)
    of_head, of_embedding = expected.pop("head.weight"), expected["embedding.weight"]
    assert min(of_head.abs().max(), of_embedding.abs().max()) > 1e-4
    expected["embedding.weight"] = of_embedding + of_head
    check_first_gradient(config, expected)


@pytest.mark.parametrize(
    ("schedule", "stages", "data", "delay", "optimizer", "coefficient"),
    [
        ("2bw-v", 2, 2, 1, "muon", 1.0),
        ("2bw-v, split", 2, 1, 1, "adamw", 0.5),
        ("2bw-v", 1, 1, 1, "adamw", 0.0),
        ("zb-v", 2, 2, 0, "adamw", 0.0),
        ("dualpipe-v", 2, 1, 0, "muon", 0.0),
        ("zero-bubble", 1, 2, 0, "adamw", 0.0),
        ("2bw", 1, 1, 1, "adamw", 1.0),
    ],
)
def test_a_run_is_the_recurrence_on_one_process(
    schedule: str, stages: int, data: int, delay: int, optimizer: str, coefficient: float
) -> None:
    config = tied_config(
        schedule,
        stages=stages,
        data=data,
        optimizer=optimizer,
        coefficient=coefficient,
        steps=6,
        precision="float64",
        clip_norm=0.5,
    )
    check_against_one_process(config, delay=delay)


@pytest.mark.slow
def test_distributed_is_replay_bit_for_bit() -> None:
    configs = [
        tied_config("2bw-v", steps=5, optimizer="muon", coefficient=1.0),
        tied_config("2bw-v, split", steps=5, precision="bfloat16"),
        tied_config("2bw-v", stages=1, data=2, steps=5),
        tied_config("zb-v", stages=1, data=2, steps=5),
    ]
    check_processes_are_replays(configs, size=2)


def test_it_goes_on_from_a_checkpoint_and_on_other_stages(tmp_path: Path) -> None:
    config = saving(tied_config("2bw-v", steps=6, coefficient=1.0, optimizer="muon"))
    replay_twice(config, tmp_path / "c", step=4)
    # A drain of 2bw-v leaves two versions, which 2bw on one rank goes on with.
    alone = replace(config, schedule=replace(config.schedule, name="2bw"))
    alone.parallel = replace(config.parallel, stages=1)
    folder = tmp_path / "cut"
    whole, resumed = Rows(), Rows()
    replay(config, recorder=whole, checkpoints=folder)
    go_back(folder, 2)
    replay(alone, recorder=resumed, checkpoints=folder)
    losses, expected = (
        torch.tensor([row["train_loss"] for row in rows.of_kind("step") if row["step"] > 2])
        for rows in (resumed, whole)
    )
    assert len(losses) == 4
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)  # float32, summed in another order


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule", ["2bw-v", "zb-v", "1f1b"])
def test_memory_is_what_the_plan_says(schedule: str, precision: str) -> None:
    stages = 1 if schedule == "1f1b" else 2
    config = tied_config(schedule, stages=stages, precision=precision, optimizer="muon")
    config.site.device = "cpu"
    rows = Rows()
    replay(config, recorder=rows)
    memory = rows.of_kind("segment")[-1]["memory"]
    programs = representative_programs(config)
    planned = stage_memory(
        config, course_of(programs), gradient_buffers=gradient_buffers(programs, data_ranks=1, on_gpu=False)
    )
    for kind in asdict(planned[0]):
        assert memory[kind] == [getattr(stage, kind) for stage in planned], kind
    parameters = rows.of_kind("start")[0]["stage_parameters"]
    assert sum(parameters) == describe(config.model).parameter_count


def test_the_matrix_is_counted_once_and_computed_with_twice() -> None:
    config = tied_config("2bw-v")
    tied, untied = (describe(replace(config.model, tied=choice)) for choice in (True, False))
    matrix = config.model.vocab_size * config.model.width
    assert tied.parameter_count == untied.parameter_count - matrix
    assert tied.training_flops(context=12) == untied.training_flops(context=12)
    assert tied.role("embedding.weight") is Role.EMBEDDING
    assert [parameter.name for parameter in tied.whole() if "head" in parameter.name] == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schedule": "1f1b"}, "on 0 and 1; accepted: false, parallel.stages: 1, or a schedule in a V"),
        ({"schedule": "interleaved-1f1b", "chunks": 2}, "interleaved-1f1b has them on 0 and 1"),
        ({"schedule": "paci", "clip": "stage"}, "needs embedding and head on one rank"),
    ],
)
def test_elsewhere_it_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        check(tied_config(**changed))
    assert refused.value.key == "model.tied"
    assert "\n" not in str(refused.value)


def test_an_order_in_which_the_gradients_of_two_steps_would_mix_is_refused() -> None:
    program = build("2bw-v", stages=2, microbatches=4, steps=3)
    assert tied_problem(program) is None
    actions = list(program.actions[0])
    updates = [place for place, action in enumerate(actions) if action.op is Op.UPDATE]
    assert [actions[place].stage for place in updates] == [3, 0] * 3
    first, second = updates[:2]
    actions[first], actions[second] = actions[second], actions[first]
    swapped = replace(program, actions=(tuple(actions), *program.actions[1:]))
    assert "needs the last stage to update before the first ends its step" in str(tied_problem(swapped))
