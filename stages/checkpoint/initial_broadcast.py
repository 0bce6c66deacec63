"""Initial weights: a data rank draws or reads the parameters it owns and broadcasts them to its peers."""

from __future__ import annotations

from collections.abc import Sequence

from stages.checkpoint.initial_weights import read_initial
from stages.comm.process import Process
from stages.config.run_config import ModelConfig
from stages.pipeline.build import Rank
from stages.shape.head_rows import whole_name


def read_initial_weights(ranks: Sequence[Rank], config: ModelConfig, *, process: Process | None) -> None:
    """Read the parameters that these ranks own from `model.init`.

    Args:
        ranks: those that this process performs.
        config: of the model.
        process: this one; None: it performs all ranks of the run.
    """
    # The hash needs all of the files: one process per machine reads them; the others read their part.
    verify = process is None or process.local_rank == 0
    for rank in ranks:
        for state in rank.stages.values():
            weights = state.weights
            names = [*map(whole_name, weights.master.names), *weights.replicas[0].named_biases()]
            weights.load_initial(read_initial(config, names, verify_hash=verify))


def broadcast_initial_weights(ranks: Sequence[Rank], *, in_process: bool) -> None:
    """Complete the first replica of every stage.

    Args:
        ranks: those that this process performs.
        in_process: whether they are all ranks of the run, so that nothing is waited for.
    """
    exchanges = [
        (
            state.weights,
            rank.connection.data.broadcast(state.weights.replicas[0].flat, state.weights.ownership.runs),
        )
        for rank in ranks
        for state in rank.stages.values()
    ]
    for weights, exchange in exchanges:
        with weights.receiving_initial():
            if not in_process:
                exchange.wait()
            exchange.take()
