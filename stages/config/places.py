"""Which process performs which rank of which pipeline. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

DATA, PIPELINE = NEIGHBOURS = ("data", "pipeline")
"""Processes with consecutive numbers, which share a node: a stage's data ranks, or a pipeline's ranks."""


class Places(NamedTuple):
    """The numbers of a run's processes."""

    stages: int
    """Ranks of a pipeline."""
    data: int
    """Pipelines."""
    neighbours: str = DATA
    """One of `NEIGHBOURS`."""

    def process(self, rank: int, data_rank: int) -> int:
        """Number of the process that performs a rank of the pipeline of a data rank."""
        if self.neighbours == DATA:
            return rank * self.data + data_rank
        return data_rank * self.stages + rank

    def of(self, process: int) -> tuple[int, int]:
        """Rank and data rank of a process."""
        if self.neighbours == DATA:
            rank, data_rank = divmod(process, self.data)
        else:
            data_rank, rank = divmod(process, self.stages)
        return rank, data_rank
