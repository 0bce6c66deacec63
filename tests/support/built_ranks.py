"""Ranks built in this process, for a test to run."""

import torch

from stages.checkpoint.initial_broadcast import broadcast_initial_weights
from stages.comm.topology import connect_in_process
from stages.config.run_config import RunConfig
from stages.config.segments import segment_program
from stages.data.dataset import prepare
from stages.pipeline.build import Rank, build_ranks


def ranks_of(config: RunConfig) -> list[Rank]:
    torch.set_num_threads(config.site.threads)
    connections = connect_in_process(
        rank_of_stage=segment_program(config, first_step=0, steps=1).rank_of_stage,
        data_ranks=config.parallel.data,
    )
    ranks = build_ranks(
        config,
        connections=connections,
        corpus=prepare(config.data),
        device=torch.device("cpu"),
        on_step=lambda result: None,
        stop=lambda: False,
    )
    broadcast_initial_weights(ranks, in_process=True)
    return ranks
