"""A start costs each rank the same connections and messages, whatever the number of ranks."""

from __future__ import annotations

import multiprocessing
import resource
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from support.connections import ESTABLISHED, tcp_sockets

from schedules import build
from stages.comm.collectives import Exchange, Group
from stages.comm.process import connected
from stages.comm.reduction_rounds import reduction_plan
from stages.comm.topology import connect
from stages.config.run_config import SiteConfig
from stages.shape.optimizer_sharding import assign_owners

STAGES = 2
NUMBERS = 1000
"""Entries of each message and of each data rank's part of the gradient."""


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
        met = len(tcp_sockets(ESTABLISHED))
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
        used = len(tcp_sockets(ESTABLISHED))
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
