"""What a run takes: a process for every rank of every replica of its pipeline."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path

import pytest
import torch
from support.command_line import asyncpp, succeeded
from support.files import write_program
from support.launches import ONE, most_at_once, sweep
from support.rows import plain

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.launch.local_machine import _planned_gb
from asyncpp_cli.planner.costs.devices import CONTEXT_GB
from asyncpp_cli.planner.memory import planned_memory
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.status import State
from asyncpp_cli.sites.resources import Machine, Resources, ranks_of, resources_of
from stages.config.run_config import ModelConfig, ParallelConfig, RunConfig, ScheduleConfig, changed

SMALL = [*ONE, "train.steps=3"]


def config_of(*, stages: int, data: int, chunks: int = 1) -> RunConfig:
    name = "interleaved-1f1b" if chunks > 1 else "1f1b"
    return RunConfig(
        schedule=ScheduleConfig(name=name, microbatches=4, chunks=chunks),
        model=ModelConfig(name="micro", layers=8, width=16, heads=2, kv_heads=2, mlp_width=32),
        parallel=ParallelConfig(stages=stages, data=data),
    )


def test_a_run_has_a_rank_for_every_stage_of_every_replica() -> None:
    assert ranks_of(config_of(stages=2, data=3)) == 6
    assert ranks_of(config_of(stages=2, data=3, chunks=2)) == 6
    config = config_of(stages=2, data=2)
    here = Machine(cores=8, gpus=("0", "1", "2", "3"))
    assert resources_of(config, replay=False, machine=here).processes == 4
    assert resources_of(config, replay=False, machine=here).gpus == 4
    assert resources_of(config, replay=True, machine=here).processes == 1
    config = changed(config, {"site.device": "cuda"})
    with pytest.raises(
        UserError, match=r"site.device is cuda, but there are no GPUs here; accepted: auto, cpu"
    ):
        resources_of(config, replay=False, machine=Machine(cores=8, gpus=()))


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_processes_share_gpus_where_there_are_fewer(device: str) -> None:
    config = config_of(stages=2, data=1)
    config = changed(config, {"site.device": device})
    one = Machine(cores=8, gpus=("0",))
    assert resources_of(config, replay=False, machine=one).gpus == 1
    assert resources_of(config, replay=True, machine=one).gpus == 1
    config = changed(config, {"site.device": "cpu"})
    assert resources_of(config, replay=False, machine=one).gpus == 0


@pytest.mark.slow
def test_a_launch_says_that_processes_share_a_gpu_and_a_run_that_it_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (run,) = sweep(tmp_path / "e", *SMALL).runs
    launched = asyncpp("launch", tmp_path / "e")
    assert "GPUs here: 1; the processes of a run share them" in launched.errors
    assert Attempt(run, 1).description().gpus == 1
    if not torch.cuda.is_available():
        logs = "".join(file.read_text() for file in run.folder.glob("logs/**/*") if file.is_file())
        assert logs.count("finds no GPU: this run trains on the CPU") == 1


@pytest.mark.slow
def test_a_cell_of_two_data_ranks_is_launched_on_two_processes(tmp_path: Path) -> None:
    (run,) = sweep(tmp_path / "e", *SMALL, "parallel.stages=1", "parallel.data=2").runs
    succeeded("launch", tmp_path / "e")
    assert run.status().state == State.COMPLETED, run.status().reason
    assert [bool(Attempt(run, 1).processes(rank)) for rank in range(3)] == [True, True, False]
    start, *rows = plain(run)
    assert [row["step"] for row in rows if row["kind"] == "step"] == [1, 2, 3]
    assert start["tokens_per_step"] == 2 * run.config().schedule.microbatches * 16
    assert rows[-1]["kind"] == "end"


def test_what_a_run_takes_of_a_gpu_is_its_fullest_ranks_and_a_context_for_each_process() -> None:
    config = config_of(stages=4, data=1)
    config = changed(config, {"optimizer.name": "adamw"})
    kinds = planned_memory(config)
    ranks = [sum(of_rank.values()) / 1e9 for of_rank in kinds]
    without = [(sum(of_rank.values()) - of_rank["communicators"]) / 1e9 for of_rank in kinds]
    assert max(ranks) > sum(ranks) / 4
    assert sum(without) < sum(ranks)
    for gpus, processes_each in ((4, 1), (2, 2), (1, 4)):
        here = Machine(cores=8, gpus=tuple(map(str, range(gpus))), gpu_gb=80.0)
        found = _planned_gb(config, resources_of(config, replay=False, machine=here))
        assert found == pytest.approx(processes_each * (max(ranks) + CONTEXT_GB))
        replayed = _planned_gb(config, resources_of(config, replay=True, machine=here))
        assert replayed == pytest.approx(sum(without) + CONTEXT_GB)
    config = changed(config, {"model.factory": "mine:model"})
    assert _planned_gb(config, Resources(ranks=4, processes=4, threads=1, gpus=4)) == inf


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "mib", "most", "said"),
    [
        ((), None, 1, "Runs wait for a free GPU: --max-parallel N trains N at a time, several on a GPU"),
        (("--max-parallel", "3"), 80_000, 3, ""),
        (("--max-parallel", "3"), 1, 1, "Fewer than 3 runs at a time: "),
        ((2,), None, 2, "Runs wait for a free GPU: site.runs_per_gpu is 2"),
    ],
)
def test_runs_share_a_gpu_as_far_as_they_are_told_to_and_fit(
    flags: tuple[str | int, ...],
    mib: int | None,
    most: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    if mib is not None:
        write_program(tmp_path / "nvidia-smi", f"echo {mib}")
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    matrix = "matrix={schedule: 1f1b, optimizer: adamw, seed: [0, 1, 2]}"
    most_of_gpu = [f"site.runs_per_gpu={word}" for word in flags if isinstance(word, int)]
    experiment = sweep(tmp_path / "e", matrix, "exclude=[]", "train.steps=2", *most_of_gpu)
    words = [word for word in flags if isinstance(word, str)]
    launched = asyncpp("launch", experiment.folder, "--replay", *words)
    assert launched.code == 0, launched.errors
    assert most_at_once(experiment) == most
    waiting = [line for line in launched.errors.splitlines() if "Runs wait" in line or "Fewer than" in line]
    assert len(waiting) == bool(said)
    assert said in launched.errors
