"""gloo communicators of three or more processes connect when first used: several per process, and in turn."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from stages.comm.process import Process, connected
from stages.comm.topology import connect
from stages.config.run_config import SiteConfig

STAGES = DATA = 3
BOUND_SECONDS = 20.0
"""After which an exchange that hangs raises; one that works takes milliseconds."""


def exchange_in_all_groups(process: Process) -> list[list[float]]:
    """The numbers of the ranks in this process's groups: pipeline and data group, of two runs."""
    received = []
    connections = []  # kept: a group that is closed cannot disturb the next one
    for _ in range(2):
        connection = connect(
            process,
            rank_of_stage=range(STAGES),
            data_ranks=DATA,
            shape=(1,),
            dtype=torch.float32,
            common_step=True,
        )
        connections.append(connection)
        for group in (connection.pipeline, connection.data):
            exchange = group.all_gather(torch.tensor([float(process.rank)]))
            exchange.wait()
            received.append([float(number) for number in exchange.take()])
    process.gather(None)
    return received


def test_each_process_uses_several_lazily_connecting_communicators(tmp_path: Path) -> None:
    """With one gloo device for all of them the second one to be used hangs."""
    size = STAGES * DATA

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
        stage, data_rank = divmod(rank, DATA)
        pipeline = [float(other * DATA + data_rank) for other in range(STAGES)]
        data = [float(stage * DATA + other) for other in range(DATA)]
        assert received == [pipeline, data] * 2
