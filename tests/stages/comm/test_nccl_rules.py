"""Training under NCCL's rules (`like_nccl`): it ends, with the weights of replay, bit for bit."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
from support.like_nccl import nccl_rules
from support.small_runs import Rows, in_processes, replayed, small_config
from support.training_cases import OPTIMIZERS, SCHEDULES

from stages.comm.process import Process
from stages.config.run_config import RunConfig
from stages.trainer import train


class Job(NamedTuple):
    config: RunConfig
    late_stage: int
    """Stage whose gradients are added up late."""


def weights_like_nccl(process: Process, job: Job) -> str:
    """The digest of a run's weights; empty but for the rank that writes."""
    rows = Rows()

    def late(name: str) -> float:
        # A group of data ranks is called "GENERATION data RANK".
        found = re.search(r"data (\d+)$", name)
        return 0.02 if found is not None and int(found[1]) == job.late_stage else 0.0

    with nccl_rules(late=late):
        train(job.config, process=process, recorder=rows)
    return "".join(row["weights_sha256"] for row in rows.of_kind("end"))


def job(schedule: str, *, stages: int, data: int, late_stage: int = 0, steps: int = 3) -> Job:
    options: dict[str, Any] = SCHEDULES[schedule]
    optimizer, coefficient = OPTIMIZERS[schedule]
    config = small_config(
        schedule,
        stages=stages,
        data=data,
        microbatches=2 * stages,
        layers=stages * options.get("chunks", 1),
        steps=steps,
        eval_interval=steps,
        optimizer=optimizer,
        coefficient=coefficient,
        **options,
    )
    return Job(config, late_stage)


def check_against_replay(jobs: list[Job], *, size: int) -> None:
    by_rank = in_processes(weights_like_nccl, jobs, size=size)
    for given, *digests in zip(jobs, *by_rank, strict=True):
        rows = replayed(given.config)
        assert [digest for digest in digests if digest] == [rows.digest], given


@pytest.mark.slow
def test_every_schedule_trains() -> None:
    check_against_replay([job(schedule, stages=2, data=1, steps=2) for schedule in SCHEDULES], size=2)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3])
def test_shards_of_the_head_train(stages: int) -> None:
    jobs = []
    tied = [("1f1b", True), ("zb-v", True)]
    for schedule, is_tied in [*((name, False) for name in ("1f1b", "2bw", "2bw-v", "zb-v", "v-half")), *tied]:
        config = small_config(
            schedule,
            stages=stages,
            microbatches=2 * stages,
            layers=2 * stages,
            steps=2,
            eval_interval=2,
            shard_head=True,
            tied=is_tied,
        )
        jobs.append(Job(config, 0))
    check_against_replay(jobs, size=stages)


@pytest.mark.slow
def test_with_data_ranks_and_late_reductions() -> None:
    jobs = [
        job(schedule, stages=2, data=2, late_stage=late, steps=2)
        for schedule, late in (("1f1b", 0), ("2bw", 1))
    ]
    check_against_replay(jobs, size=4)
