"""Validation loss at a drain: forwards alone, with the weights that are evaluated and saved."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping

import torch
from torch import Tensor
from torch.func import functional_call

from schedules.actions import Action, Op, Program
from schedules.messages import received, sent
from stages.data import Batches
from stages.executor import StageState
from stages.model import next_token_loss
from stages.transport import Links


def forward_program(*, rank_of_stage: tuple[int, ...], microbatches: int, version: int) -> Program:
    """The program that sends `microbatches` micro-batches forward through all stages."""
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
                for microbatch in range(microbatches)
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
    rank: int,
    stages: Mapping[int, StageState],
    links: Links,
    batches: Batches,
    dtype: torch.dtype,
    on_action: Callable[[], None],
) -> Generator[None, None, float | None]:
    """Run the rank's part of `forward_program`; yields where another rank of this process must go on first.

    Args:
        program: `forward_program`'s.
        rank: whose part.
        stages: the stages of that rank, by number.
        links: to the other ranks.
        batches: where tokens and targets come from.
        dtype: that is computed in.
        on_action: called when an action begins.

    Returns:
        Mean loss in nats a token on the rank of the last stage, None elsewhere.
    """
    links.begin(program)
    weights = {stage: evaluation_weights(state, dtype=dtype) for stage, state in stages.items()}
    losses: list[Tensor] = []
    for action in program.actions[rank]:
        on_action()
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
            losses.append(next_token_loss(output, targets))
        else:
            links.send(message, output)
        if activation is not None:
            links.release(given)
    return float(torch.stack(losses).double().mean()) if losses else None


def evaluation_weights(state: StageState, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """The stage's weights that are evaluated and saved, by parameter name, as `dtype`."""
    tensors = state.update.correction.evaluation_weights(state.weights.master.parameters)
    return {
        name: tensor.detach().to(dtype) for name, tensor in zip(state.weights.names, tensors, strict=True)
    }
