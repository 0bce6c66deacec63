"""Which GPU and which cores a process takes."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.small_runs import in_processes

import schedules
from stages.comm.device_settings import gpu_of, run_near
from stages.comm.process import Process
from stages.comm.topology import connect
from stages.config.places import DATA, NEIGHBOURS, Places


@pytest.mark.parametrize(
    ("stages", "data", "local"), [(16, 1, 8), (8, 2, 8), (4, 4, 8), (32, 1, 8), (12, 2, 8)]
)
def test_neighbours_on_two_machines_have_gpus_of_one_number(stages: int, data: int, local: int) -> None:
    def place(rank: int) -> tuple[int, int]:
        gpu = gpu_of(rank=rank, local_rank=rank % local, local_size=local, data_ranks=data, gpus=local)
        return rank // local, gpu

    assert len({place(rank) for rank in range(stages * data)}) == stages * data
    for of_data in range(data):
        for one, other in pairwise(place(stage * data + of_data) for stage in range(stages)):
            assert one[0] == other[0] or one[1] == other[1]


@pytest.mark.parametrize(
    "given",
    [
        {"rank": 11, "local_rank": 3, "local_size": 8, "data_ranks": 1, "gpus": 1},  # one GPU per task
        {"rank": 11, "local_rank": 3, "local_size": 8, "data_ranks": 3, "gpus": 8},
        {"rank": 11, "local_rank": 3, "local_size": 5, "data_ranks": 1, "gpus": 8},  # machines differ
        {"rank": 3, "local_rank": 3, "local_size": 8, "data_ranks": 1, "gpus": 8},
        {"rank": 11, "local_rank": 3, "local_size": 8, "data_ranks": None, "gpus": 8},  # pipelines in nodes
    ],
    ids=str,
)
def test_otherwise_gpus_are_taken_in_order(given: dict[str, int]) -> None:
    assert gpu_of(**given) == 3 % given["gpus"]


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_neighbours_have_consecutive_numbers(neighbours: str) -> None:
    places = Places(stages=4, data=3, neighbours=neighbours)
    numbers = {places.of(process): process for process in range(12)}
    assert set(numbers) == {(rank, data_rank) for rank in range(4) for data_rank in range(3)}
    for (rank, data_rank), process in numbers.items():
        assert places.process(rank, data_rank) == process
        following = (rank, data_rank + 1) if neighbours == DATA else (rank + 1, data_rank)
        assert numbers.get(following, process + 1) == process + 1


def places_in(process: Process, neighbours: str) -> tuple[int, int]:
    """Rank and data rank of a process of two pipelines of two ranks."""
    program = schedules.build("1f1b", stages=2, microbatches=2, steps=1)
    connection = connect(
        process, program, shape=(1,), dtype=torch.float32, common_step=True, neighbours=neighbours
    )
    return connection.rank, connection.data.rank


@pytest.mark.slow
def test_processes_take_the_places_of_their_numbers() -> None:
    by_process = in_processes(places_in, NEIGHBOURS, size=4)
    for number, found in enumerate(by_process):
        assert found == [Places(2, 2, neighbours).of(number) for neighbours in NEIGHBOURS]


@pytest.mark.skipif(sys.platform != "linux", reason="affinity of processes is Linux's")
def test_a_process_runs_on_those_of_its_cores_that_are_near(tmp_path: Path) -> None:
    own = os.sched_getaffinity(0)
    first, last = {min(own)}, {max(own)}
    near = tmp_path / "0000:3b:00.0" / "local_cpulist"
    near.parent.mkdir()

    def taken(binding: set[int]) -> set[int]:
        os.sched_setaffinity(0, binding)
        run_near("0000:3b:00.0", devices=tmp_path)
        return os.sched_getaffinity(0)

    def in_a_thread(binding: set[int]) -> set[int]:
        """A thread has an affinity of its own, which ends with it."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(taken, binding).result()

    assert in_a_thread(own) == own  # nothing is known
    for text, binding, cores in (
        (f"{min(own)},{max(own) + 1}-{max(own) + 8}\n", own, first),
        (f"{max(own)}\n", own, last),
        (f"{max(own)}\n", first, first),  # a job was given no core near its GPU
        ("\n", own, own),
    ):
        near.write_text(text)
        assert in_a_thread(binding) == cores
    assert os.sched_getaffinity(0) == own
