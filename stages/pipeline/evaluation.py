"""Validation loss at a drain: forwards alone, with the weights that are evaluated and saved."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.func import functional_call

from schedules.actions import Action, Op, Program
from schedules.dependencies import launched
from schedules.messages import received, sent
from stages.comm.collectives import Exchange
from stages.comm.p2p import Links
from stages.comm.topology import Connection
from stages.data.batches import Batches
from stages.model.head_shard import HeadShard, merge_parts
from stages.update.optimizer_step import StageState
from stages.weights.flat_buffers import members_of

if TYPE_CHECKING:
    from stages.weights.sharded_weights import ShardedWeights

HOP = 1.5
"""Time from one stage's forward to the next one's, in forwards."""


class ValidationLoss(NamedTuple):
    """What an evaluation measures, in nats a token."""

    mean: float
    error: float | None
    """Standard error of the mean, from the losses of its micro-batches; None for a single one."""


def forward_program(
    program: Program, *, microbatches: int, version: int, data_rank: int, data_ranks: int
) -> Program:
    """The program that sends every `data_ranks`-th of `microbatches` micro-batches forward through all
    stages of `program`.

    Each rank performs its actions in the order of their times, if the first stage begins a micro-batch as
    often as a rank can, and every stage takes as long as all others and its message half of that. So no rank
    waits for what is later on another one, and with faster messages none waits once all have begun.
    """
    rank_of_stage, head_shards, tied_shards = program.rank_of_stage, program.head_shards, program.tied_shards
    blocks = program.loss_stage + 1
    own = range(data_rank, microbatches, data_ranks)

    def actions(rank: int) -> list[Action]:
        stages = [stage for stage, holder in enumerate(rank_of_stage) if holder == rank]
        of_blocks = [stage for stage in stages if stage < blocks]
        places = [(stage, stage, Op.FORWARD) for stage in of_blocks]
        for shard in stages[len(of_blocks) :]:
            places += [(blocks, shard, Op.HEAD), *[(-1, shard, Op.EMBED)] * tied_shards]
        if head_shards and blocks - 1 in stages:
            places.append((blocks + 1, blocks - 1, Op.LOSS))
        timed = sorted(
            (HOP * place + len(of_blocks) * number, microbatch, stage, op)
            for number, microbatch in enumerate(own)
            for place, stage, op in places
        )
        return [Action(stage, op, microbatch, version) for _, microbatch, stage, op in timed]

    return Program(
        schedule="evaluation",
        microbatches=microbatches,
        update_interval=microbatches,
        steps=1,
        first_step=0,
        rank_of_stage=rank_of_stage,
        head_shards=head_shards,
        tied_shards=tied_shards,
        initial_versions=(version,),
        final_versions=(version,),
        actions=tuple(tuple(actions(rank)) for rank in range(program.num_ranks)),
    )


@torch.no_grad()
def evaluate(
    stages: Mapping[int, StageState],
    program: Program,
    *,
    connection: Connection,
    batches: Batches,
    version: int,
    dtype: torch.dtype,
    on_action: Callable[[], None],
    averaged: bool = False,
) -> Generator[None, None, dict[str, ValidationLoss] | None]:
    """Run one rank's part of `forward_program`; yields where another rank of this process must run first.

    Args:
        stages: of the rank, by number.
        program: of any segment of the run.
        connection: of the rank to the others.
        batches: source of tokens and targets. The data ranks share the micro-batches of its validation sets.
        version: of the evaluated weights.
        dtype: of the computation.
        on_action: called when an action begins.
        averaged: whether to evaluate the average of the weights (`train.ema_decay`).

    Returns:
        The loss of each validation set on the ranks of the last stage, None elsewhere. Summed in the order of
        the micro-batches, so that it does not depend on the number of data ranks.
    """
    links, data = connection.links, connection.data
    read = [(name, index) for name, count in batches.evaluated.items() for index in range(count)]
    program = forward_program(
        program, microbatches=len(read), version=version, data_rank=data.rank, data_ranks=data.size
    )
    links.begin(program)
    weights = {}
    for stage, state in stages.items():
        weights[stage] = yield from _whole_weights(state, connection, dtype=dtype, averaged=averaged)
        if state.tied is not None:
            weights[stage] |= state.tied.weights(weights[0])
    losses: dict[int, Tensor] = {}
    own_microbatches = range(data.rank, len(read), data.size)
    for number, action in enumerate(program.actions[connection.rank]):
        on_action()
        links.passed(launched(number))
        name, index = read[action.microbatch]
        tokens, targets = batches.validation(index, count=batches.evaluated[name], name=name)
        incoming = []
        for message in received(action, program):
            while not links.waits and not links.arrived(message):
                yield
            incoming.append(links.receive(message))
        if action.op is Op.LOSS:
            loss = merge_parts(incoming, scale=1.0).loss
            losses[action.microbatch] = loss.double()
            continue
        # Embedded tokens of several shards, of which all but one are 0 for each token, add up.
        given, *others = incoming or [tokens]
        for other in others:
            given = given + other
        # The replica's module has the right type; its own weights are not used.
        module = stages[action.stage].weights.replicas[0].module
        routing = stages[action.stage].weights.newest().routing()
        outgoing = sent(action, program)
        documents = batches.validation_documents(index, count=batches.evaluated[name], name=name)
        has_loss = action.op is Op.HEAD or not outgoing
        asked = {"targets": targets if has_loss else None, "documents": documents}
        # A shard of embedding and head is one module under two names.
        once = isinstance(module.head, HeadShard)
        output = functional_call(module, weights[action.stage], (given, routing), asked, tie_weights=not once)
        links.send_all(outgoing, output)
        if not outgoing:
            losses[action.microbatch] = output.double()
    if program.loss_stage not in stages:
        return None
    for state in stages.values():
        # All processes gather weights as often.
        if state.weights.is_sharded and len(own_microbatches) < -(-len(read) // data.size):
            tokens, targets = batches.validation(0, count=1)
            state.weights.replicas[0].module(tokens, state.weights.newest().routing(), targets=targets)
    return (yield from _gathered(losses, program.microbatches, connection, batches))


def _gathered(
    losses: Mapping[int, Tensor], count: int, connection: Connection, batches: Batches
) -> Generator[None, None, dict[str, ValidationLoss]]:
    """The loss of each validation set, from those that each data rank has computed.

    Args:
        losses: of this data rank, scalars by micro-batch.
        count: number of micro-batches of all data ranks.
        connection: of the rank to the others.
        batches: source of the micro-batches.
    """
    links, data = connection.links, connection.data
    nothing = torch.zeros((), dtype=torch.float64, device=batches.device)
    own_losses = [losses.get(microbatch, nothing) for microbatch in range(count)]
    gathering = data.all_gather(torch.stack(own_losses))
    yield from _awaited(gathering, links)
    by_data_rank = gathering.take()
    in_order = [by_data_rank[microbatch % data.size][microbatch] for microbatch in range(count)]
    of_sets = torch.split(torch.stack(in_order), list(batches.evaluated.values()))
    return {name: _loss(of_set) for name, of_set in zip(batches.evaluated, of_sets, strict=True)}


def _loss(of_microbatches: Tensor) -> ValidationLoss:
    count = len(of_microbatches)
    error = float(of_microbatches.std() / count**0.5) if count > 1 else None
    return ValidationLoss(mean=float(of_microbatches.mean()), error=error)


def _whole_weights(
    state: StageState, connection: Connection, *, dtype: torch.dtype, averaged: bool
) -> Generator[None, None, dict[str, Tensor]]:
    """The stage's evaluation weights, or their average, by parameter name, gathered from the data ranks that
    own them."""
    weights, owned = state.weights, evaluation_weights(state, dtype=dtype, averaged=averaged)
    if weights.is_sharded:
        # Its module has the weights; an average takes their place until the end of the evaluation.
        if averaged:
            cast("ShardedWeights", weights).show(list(owned.values()))
        return {}
    if connection.data.size == 1 and list(owned) == weights.names:
        return owned
    flat, views = weights.flat(dtype=dtype)
    members = [member for view in views for member in members_of(view)]
    for number, tensor in zip(weights.owned, owned.values(), strict=True):
        members[number].copy_(tensor)
    if connection.data.size > 1:
        spreading = connection.data.broadcast(flat, weights.ownership.runs)
        yield from _awaited(spreading, connection.links)
        spreading.take()
    return dict(zip(weights.names, views, strict=True))


def _awaited(exchange: Exchange[Any], links: Links) -> Iterator[None]:
    while not links.waits and not exchange.ready():
        yield
    if links.waits:
        exchange.wait()


def evaluation_weights(state: StageState, *, dtype: torch.dtype, averaged: bool = False) -> dict[str, Tensor]:
    """The evaluated and saved weights of the members that this data rank owns, or their average, by name, as
    `dtype`."""
    master, update = state.weights.master, state.update
    if averaged:
        assert update.average is not None
        tensors = update.average.average(master.parameters)
    else:
        tensors = update.correction.evaluation_weights(master.parameters)
    return {name: tensor.detach().to(dtype) for name, tensor in zip(master.names, tensors, strict=True)}


def weights_and_biases(state: StageState, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """These, and the balance biases that this data rank saves."""
    weights = state.weights
    return evaluation_weights(state, dtype=dtype) | weights.own_biases(weights.newest())
