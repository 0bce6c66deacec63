"""How a rank reaches the others: along its pipeline, and across to its data-parallel peers.

The process that performs rank r of the pipeline of data rank d is number `r * data_ranks + d`. So data ranks
of a stage are neighbours, which share a node and its fast links; what a pipeline sends is small and may cross
nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stages.groups import Alone, DistributedGroup, Group, InProcessGroup, Meeting
from stages.process import Process
from stages.transport import DistributedLinks, InProcessLinks, Links


@dataclass(frozen=True, kw_only=True)
class Connection:
    """One rank's."""

    rank: int
    """Of the pipeline."""
    links: Links
    pipeline: Group
    """The ranks of its pipeline, in order."""
    data: Group
    """The data ranks that hold the same stages; its rank there is the data rank."""


def connect(
    process: Process,
    *,
    rank_of_stage: Sequence[int],
    data_ranks: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    common_step: bool,
) -> Connection:
    """The connection of one of `size` processes, a rank each.

    Args:
        process: this one.
        rank_of_stage: which rank of a pipeline performs each stage.
        data_ranks: pipelines.
        shape: of every activation and gradient.
        dtype: likewise.
        common_step: whether all stages update together.
    """
    rank, data_rank = divmod(process.rank, data_ranks)
    ranks = process.size // data_ranks
    generation = next(process.generations)
    members = [other * data_ranks + data_rank for other in range(ranks)]
    peers = [rank * data_ranks + other for other in range(data_ranks)]

    def group(name: str, processes: list[int]) -> Group:
        if len(processes) == 1:
            return Alone()
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
            name=f"{generation} {data_rank}",
            members=members,
            rank_of_stage=rank_of_stage,
            shape=shape,
            dtype=dtype,
            common_step=common_step,
        ),
        pipeline=group(f"pipeline {data_rank}", members),
        data=group(f"data {rank}", peers),
    )


def connect_in_process(*, rank_of_stage: Sequence[int], data_ranks: int) -> list[Connection]:
    """The connections of all ranks of all pipelines, in the order of the processes that would perform
    them."""
    ranks = max(rank_of_stage) + 1
    pipelines = [(InProcessLinks(), Meeting(ranks)) for _ in range(data_ranks)]
    connections = []
    for rank in range(ranks):
        data = Meeting(data_ranks)
        for data_rank, (links, pipeline) in enumerate(pipelines):
            connections.append(
                Connection(
                    rank=rank,
                    links=links,
                    pipeline=InProcessGroup(pipeline, rank=rank) if ranks > 1 else Alone(),
                    data=InProcessGroup(data, rank=data_rank) if data_ranks > 1 else Alone(),
                )
            )
    return connections
