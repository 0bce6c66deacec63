"""The links and groups of a rank: along its pipeline, and to its data-parallel peers.

By default the data ranks of a stage have consecutive numbers (`stages.config.places`) and share a node and
its fast links; a pipeline's messages are small and may cross nodes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from schedules import Program
from schedules.messages import links_of_ranks
from stages.comm.collectives import (
    DistributedGroup,
    Group,
    InProcessExchanges,
    InProcessGroup,
    SingleRankGroup,
)
from stages.comm.device_settings import check_queues
from stages.comm.p2p import DistributedLinks, InProcessLinks, Links
from stages.comm.process import Process
from stages.comm.sharding import Sharding, connect_sharding
from stages.config.places import DATA, Places


@dataclass(frozen=True, kw_only=True)
class Connection:
    """The links and groups of one rank."""

    rank: int
    """In its pipeline."""
    links: Links
    pipeline: Group
    """The ranks of its pipeline, in order."""
    data: Group
    """The data ranks that hold the same stages; the rank in it is the data rank."""
    sharding: Sharding | None = None
    """Under a schedule that shards the model: the processes that hold it together."""


def connect(
    process: Process,
    program: Program,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    common_step: bool,
    shards: int | None = None,
    neighbours: str = DATA,
) -> Connection:
    """The connection of this process, which performs one rank. All processes call it together.

    Args:
        process: this one.
        program: of any segment of the run: who performs which stage is the same in all.
        shape: of every activation and activation gradient.
        dtype: of all messages.
        common_step: whether all stages update together.
        shards: processes that hold the model together; None: it is not sharded.
        neighbours: which processes have consecutive numbers, as in `stages.config.places`.

    Raises:
        DeviceSettingError: a GPU has too few queues for a rank's communicators.
    """
    ranks = program.num_ranks
    data_ranks = process.size // ranks
    if process.device_waits:
        links = links_of_ranks(
            program.rank_of_stage, head_shards=program.head_shards, tied_shards=program.tied_shards
        )
        most = max(of_rank.communicators for of_rank in links)
        of_shards = 0 if shards is None else 2 + (shards < data_ranks)
        check_queues(os.environ, communicators=most + (ranks > 1) + (data_ranks > 1) + of_shards)
    places = Places(ranks, data_ranks, neighbours)
    rank, data_rank = places.of(process.rank)
    generation = next(process.generations)
    members = [places.process(other, data_rank) for other in range(ranks)]
    peers = [places.process(rank, other) for other in range(data_ranks)]

    def group(name: str, processes: list[int]) -> Group:
        if len(processes) == 1:
            return SingleRankGroup()
        communicator = process.communicator(f"{generation} {name}", processes)
        return DistributedGroup(
            communicator,
            rank=processes.index(process.rank),
            size=len(processes),
            device_waits=process.device_waits,
        )

    return Connection(
        rank=rank,
        links=DistributedLinks(
            process,
            program,
            name=f"{generation} {data_rank}",
            members=members,
            shape=shape,
            dtype=dtype,
            common_step=common_step,
        ),
        pipeline=group(f"pipeline {data_rank}", members),
        data=group(f"data {rank}", peers),
        sharding=None
        if shards is None
        else connect_sharding(process, name=f"{generation} sharding", shards=shards),
    )


def connect_in_process(*, rank_of_stage: Sequence[int], data_ranks: int) -> list[Connection]:
    """The connections of all ranks of a replay, ordered as the processes of a distributed run."""

    ranks = max(rank_of_stage) + 1
    pipelines = [(InProcessLinks(), InProcessExchanges(ranks)) for _ in range(data_ranks)]
    connections = []
    for rank in range(ranks):
        data = InProcessExchanges(data_ranks)
        for data_rank, (links, pipeline) in enumerate(pipelines):
            connections.append(
                Connection(
                    rank=rank,
                    links=links,
                    pipeline=InProcessGroup(pipeline, rank=rank) if ranks > 1 else SingleRankGroup(),
                    data=InProcessGroup(data, rank=data_rank) if data_ranks > 1 else SingleRankGroup(),
                )
            )
    return connections
