"""The whole model of a checkpoint in one process, and text drawn from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stages.checkpoint.export_options import Weights
from stages.checkpoint.saved_weights import SavedWeights
from stages.config.run_config import RunConfig
from stages.model.custom import make_stage
from stages.model.decoder import Stage
from stages.model.routing import Routing
from stages.shape.partition import cut_model
from stages.shape.stacks import member_names
from stages.weights.flat_buffers import members_of


def whole_model(saved: SavedWeights, config: RunConfig) -> tuple[Stage, Routing]:
    """The run's whole model with the evaluation weights of a checkpoint, in float32 on the CPU, and its
    balance biases."""
    [cut] = cut_model(config.model, stages=1, context=config.data.context)
    module = make_stage(config.model, cut, context=config.data.context)
    module.prepare(device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            names = member_names(name, tuple(parameter.shape))
            weights = saved.read(names, Weights.MASTER)
            for member, each in zip(members_of(parameter), names, strict=True):
                member.copy_(weights[each])
    biases = saved.read(saved.biases, Weights.MASTER)
    return module, Routing({int(name.split(".")[1]): bias for name, bias in biases.items()})


@torch.no_grad()
def generate(
    module: Stage,
    routing: Routing,
    given: Sequence[int],
    *,
    count: int,
    context: int,
    temperature: float,
    seed: int,
    end: int,
) -> list[int]:
    """Tokens that follow `given`, each drawn from the softmax of the logits over the temperature.

    The model sees the last `context` tokens. The document's end is not among what is returned.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(given)
    for _ in range(count):
        seen = torch.tensor([tokens[-context:]])
        logits = module(seen, routing)[0, -1].double()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            probabilities = torch.softmax(logits / temperature, dim=-1)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
        if token == end:
            break
        tokens.append(token)
    return tokens[len(given) :]
