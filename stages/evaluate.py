"""Validation loss at a drain: forwards alone, with the weights that are evaluated and saved."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from schedules.actions import Action, Op, Program
from schedules.dependencies import launched
from schedules.messages import received, sent
from stages.connection import Connection
from stages.data import Batches
from stages.groups import Exchange
from stages.model import next_token_loss
from stages.transport import Links
from stages.update import StageState


def forward_program(
    *,
    rank_of_stage: tuple[int, ...],
    microbatches: int,
    version: int,
    data_rank: int,
    data_ranks: int,
) -> Program:
    """The program that sends a data rank's share of `microbatches` micro-batches forward through all stages:
    every `data_ranks`-th."""
    ranks = range(max(rank_of_stage) + 1)
    return Program(
        schedule="evaluation",
        microbatches=microbatches,
        update_interval=microbatches,
        steps=1,
        first_step=0,
        rank_of_stage=rank_of_stage,
        initial_versions=(version,),
        final_versions=(version,),
        actions=tuple(
            tuple(
                Action(stage, Op.FORWARD, microbatch, version)
                for microbatch in range(data_rank, microbatches, data_ranks)
                for stage, holder in enumerate(rank_of_stage)
                if holder == rank
            )
            for rank in ranks
        ),
    )


@torch.no_grad()
def evaluate(
    program: Program,
    *,
    connection: Connection,
    stages: Mapping[int, StageState],
    batches: Batches,
    dtype: torch.dtype,
    on_action: Callable[[], None],
) -> Generator[None, None, float | None]:
    """Run the rank's part of `forward_program`; yields where another rank of this process must go on first.

    Args:
        program: `forward_program`'s, of the rank's data rank.
        connection: of the rank to the others.
        stages: those of the rank, by number.
        batches: where tokens and targets come from.
        dtype: that is computed in.
        on_action: called when an action begins.

    Returns:
        Mean loss in nats a token on the ranks of the last stage, None elsewhere. Taken in the order of the
        micro-batches, so that it does not depend on how many data ranks share them.
    """
    links, data = connection.links, connection.data
    links.begin(program)
    weights = {}
    for stage, state in stages.items():
        weights[stage] = yield from _whole_weights(state, connection, dtype=dtype)
    losses: dict[int, Tensor] = {}
    for number, action in enumerate(program.actions[connection.rank]):
        on_action()
        links.passed(launched(number))
        activation = received(action, program.num_stages)
        tokens, targets = batches.validation(action.microbatch, count=program.microbatches)
        if activation is None:
            given = tokens
        else:
            while not links.waits and not links.arrived(activation):
                yield
            given = links.receive(activation)
        # A replica is a module of the type that is computed in; its own weights are left out of it.
        module = stages[action.stage].weights.replicas[0].module
        output = functional_call(module, weights[action.stage], (given,))
        message = sent(action, program.num_stages)
        if message is None:
            losses[action.microbatch] = next_token_loss(output, targets).double()
        else:
            links.send(message, output)
        if activation is not None:
            links.release(given)
    if program.num_stages - 1 not in stages:
        return None
    nothing = torch.zeros((), dtype=torch.float64, device=batches.device)
    mine = [losses.get(microbatch, nothing) for microbatch in range(program.microbatches)]
    shared = data.share(torch.stack(mine))
    yield from _awaited(shared, links)
    of_ranks = shared.take()
    in_order = [of_ranks[microbatch % data.size][microbatch] for microbatch in range(program.microbatches)]
    return float(torch.stack(in_order).mean())


def _whole_weights(
    state: StageState, connection: Connection, *, dtype: torch.dtype
) -> Generator[None, None, dict[str, Tensor]]:
    """The stage's weights that are evaluated, by parameter name, gathered from the data ranks that own
    them."""
    mine = evaluation_weights(state, dtype=dtype)
    if connection.data.size == 1:
        return mine
    flat, views = state.weights.flat(dtype=dtype)
    whole = dict(zip(state.weights.names, views, strict=True))
    for name, tensor in mine.items():
        whole[name].copy_(tensor)
    spreading = connection.data.spread(flat, state.weights.ownership.bounds)
    yield from _awaited(spreading, connection.links)
    spreading.take()
    return whole


def _awaited(exchange: Exchange[Any], links: Links) -> Iterator[None]:
    while not links.waits and not exchange.ready():
        yield
    if links.waits:
        exchange.wait()


def evaluation_weights(state: StageState, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights that are evaluated and saved, of the parameters that this data rank owns, by name, as
    `dtype`."""
    master = state.weights.master
    tensors = state.update.correction.evaluation_weights(master.parameters)
    return {name: tensor.detach().to(dtype) for name, tensor in zip(master.names, tensors, strict=True)}
