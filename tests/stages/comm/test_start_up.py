"""A start costs each rank the same connections, messages and files, whatever the number of ranks."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncpp_cli.launch.common.supervisor import Supervisor
from asyncpp_cli.runs.attempts.claims import check_current, claim, record_processes
from asyncpp_cli.runs.attempts.settle import end_rank
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State
from schedules import build
from stages.comm.collectives import Exchange, Group
from stages.comm.process import Process, connected
from stages.comm.reduction_rounds import reduction_plan
from stages.comm.topology import connect
from stages.config.run_config import SiteConfig
from stages.shape.optimizer_sharding import assign_owners

STAGES = 2
NUMBERS = 1000
"""Entries of each message and of each data rank's part of the gradient."""


def tcp_connections() -> int:
    """Established TCP connections of this process."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(str(descriptor.readlink()))
        except OSError:
            continue
    columns = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(fields[3] == "01" and f"socket:[{fields[9]}]" in own for fields in columns)


def use(group: Group) -> None:
    """Perform every collective of a training step in a group."""

    def take(exchange: Exchange[Any]) -> None:
        exchange.wait()
        exchange.take()

    take(group.all_gather(torch.zeros(1)))
    ownership = assign_owners([(NUMBERS,)] * group.size, data_ranks=group.size)
    plan = reduction_plan([NUMBERS] * group.size, ownership, number_bytes=4)
    flat = torch.zeros(NUMBERS * group.size)
    reduction = group.reduce_scatter(flat, plan, early=False)
    reduction.advance(group.size)
    take(reduction)
    take(group.broadcast(flat, ownership.runs))


def counts_of_rank(results: Pipe, folder: Path, rank: int, ranks: int) -> None:
    """Connect as one rank, use every link and group; sends (connections met, connections used, messages)."""
    torch.set_num_threads(1)
    site = SiteConfig(device="cpu", timeout=300.0, start_timeout=300.0)
    place = {"rank": rank, "size": ranks, "local_rank": rank, "local_size": ranks}
    with connected(**place, rendezvous=folder, site=site) as process:
        process.meetings.gather(None, to=0)
        met = tcp_connections()
        process.meetings.gather(None, to=0)
        connection = connect(
            process,
            build("1f1b", stages=STAGES, microbatches=1, steps=1),
            shape=(NUMBERS,),
            dtype=torch.float32,
            common_step=True,
        )
        connection.links.connect()
        for group in (connection.pipeline, connection.data):
            use(group)
        process.meetings.gather(None, to=0)
        used = tcp_connections()
        process.meetings.gather(None, to=0)
        results.send((met, used, process.member.requests))


def connection_counts(folder: Path, ranks: int) -> list[tuple[int, int, int]]:
    """By rank, each in a process forked from this one."""
    context = multiprocessing.get_context("fork")
    workers = []
    for rank in range(ranks):
        receiving, sending = context.Pipe(duplex=False)
        worker = context.Process(target=counts_of_rank, args=(sending, folder, rank, ranks))
        worker.start()
        sending.close()
        workers.append((worker, receiving))
    counts = [receiving.recv() for _, receiving in workers]
    for worker, _ in workers:
        worker.join()
    return counts


@pytest.mark.slow
def test_connections_and_messages_of_a_rank_do_not_grow_with_the_number_of_ranks(tmp_path: Path) -> None:
    few, many = (connection_counts(tmp_path / str(ranks), ranks) for ranks in (4, 8))
    for column in (0, 2):
        assert 0 < max(row[column] for row in many[1:]) == max(row[column] for row in few[1:]) < 20
    assert sum(row[2] for row in many) == 2 * sum(row[2] for row in few)
    assert many[0][0] - few[0][0] == 4, "rank 0 has one connection to each rank"
    # With gloo, one for each further data rank.
    assert max(row[1] for row in many[1:]) - max(row[1] for row in few[1:]) <= 2


class FileCounter:
    """Counts the files and folders below `folder` that this process opens, and the writes of status.json."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self.opened = self.status_writes = 0
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            self.opened += str(arguments[0]).startswith(self._folder)
        elif event == "os.rename":
            self.status_writes += str(arguments[1]) == f"{self._folder}/status.json"

    def count(self, work: Callable[[], object]) -> int:
        """The number of files that `work` opens."""
        before = self.opened
        work()
        return self.opened - before


def file_counts(folder: Path, ranks: int) -> dict[str, int]:
    """Files that the supervisors and ranks of one attempt open, from the claim to the settled status."""
    run = Run(folder)
    folder.mkdir()
    counter = FileCounter(folder)
    attempt = claim(run, processes=ranks, replay=False, steps=0)
    assert attempt is not None

    def start(rank: int) -> None:
        attempt.record_start(rank, this_process(), this_process())
        check_current(attempt)

    def look(rank: int) -> None:
        trainer: Any = None
        supervisor = Supervisor(attempt, {rank: trainer}, size=ranks, grace=60.0, lease=60.0, received=[])
        assert supervisor._seconds_left() is None

    def end(rank: int) -> None:
        end_rank(attempt, rank, code=0, signal_number=None, stopped=False)

    starts = [counter.count(lambda rank=rank: start(rank)) for rank in range(ranks)]
    # Rank 0 knows all processes once they have met.
    starts[0] += counter.count(lambda: record_processes(attempt, [this_process().pid] * ranks))
    counts = {"start": max(starts), "status writes": counter.status_writes}
    counts["look"] = max(counter.count(lambda rank=rank: look(rank)) for rank in range(ranks))
    *ends, last = (counter.count(lambda rank=rank: end(rank)) for rank in range(ranks))
    assert run.status().state != State.RUNNING
    return counts | {"end": max(ends), "last": last}


def test_files_that_a_rank_opens_do_not_grow_with_the_number_of_ranks(tmp_path: Path) -> None:
    few, many = (file_counts(tmp_path / str(ranks), ranks) for ranks in (4, 8))
    # The last rank to end settles the run: it reads the end of each.
    assert many.pop("last") - few.pop("last") == 4
    assert few == many
    assert all(0 < count < 20 for count in few.values())


SIDE = 3
"""Stages, and data ranks."""
BOUND_SECONDS = 20.0
"""After which an exchange that hangs raises; one that works takes milliseconds."""


def exchange_in_all_groups(process: Process) -> list[list[float]]:
    """The numbers of the ranks in this process's groups: pipeline and data group, of two runs."""
    received = []
    connections = []  # kept: a group that is closed cannot disturb the next one
    for _ in range(2):
        connection = connect(
            process,
            build("1f1b", stages=SIDE, microbatches=1, steps=1),
            shape=(1,),
            dtype=torch.float32,
            common_step=True,
        )
        connections.append(connection)
        for group in (connection.pipeline, connection.data):
            exchange = group.all_gather(torch.tensor([float(process.rank)]))
            exchange.wait()
            received.append([float(number) for number in exchange.take()])
    process.meetings.gather(None)
    return received


def test_each_process_uses_several_lazily_connecting_communicators(tmp_path: Path) -> None:
    """With one gloo device for all of them the second one to be used hangs."""
    size = SIDE**2

    def run_rank(rank: int) -> list[list[float]]:
        with connected(
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            rendezvous=tmp_path / "rendezvous",
            site=SiteConfig(device="cpu", timeout=BOUND_SECONDS),
        ) as process:
            return exchange_in_all_groups(process)

    with ThreadPoolExecutor(size) as pool:
        by_rank = list(pool.map(run_rank, range(size)))
    for rank, received in enumerate(by_rank):
        stage, data_rank = divmod(rank, SIDE)
        pipeline = [float(other * SIDE + data_rank) for other in range(SIDE)]
        data = [float(stage * SIDE + other) for other in range(SIDE)]
        assert received == [pipeline, data] * 2


def test_a_process_may_open_as_many_files_as_the_system_lets_it(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with connected(
            rank=0, size=1, local_rank=0, local_size=1, rendezvous=tmp_path, site=SiteConfig(device="cpu")
        ):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
