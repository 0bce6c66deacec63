"""How a stage runs a block: as it stands, with its activations recomputed in backward, compiled, or both.

Recomputation runs the block a second time when its backward begins, on the same replica: with the weights
that the backward reads. Under a stash those are the forward's, and nothing changes. Without one (`paci`)
they are the newest: inside the block everything is then of the newest weights, and the input alone is of the
forward's.

One compilation serves all blocks of all versions: the parameters are inputs of what is compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from stages.config import ModelConfig
from stages.model import Block, RunBlock, run_as_it_stands
from stages.split_backward import deferred_now, deferring


def block_runner(config: ModelConfig, *, recompute: bool, compiled: bool) -> RunBlock:
    """How the blocks of a model are run in training.

    Args:
        config: the model.
        recompute: keep a block's input alone, and run it again in backward.
        compiled: run what torch.compile makes of it.
    """
    run = _run_compiled(config) if compiled else run_as_it_stands
    return _recomputing(run, random=config.factory is not None) if recompute else run


def _recomputing(run: RunBlock, *, random: bool) -> RunBlock:
    """Run blocks so; `random`: the second run must draw what the first drew."""

    def run_block(block: nn.Module, x: Tensor, rotation: Tensor | None) -> Tensor:
        deferred = deferred_now()

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            # In a split backward the second run leaves its weight gradients where the first would have.
            return nullcontext(), deferring(deferred)

        out: Tensor = checkpoint(
            run,
            block,
            x,
            rotation,
            use_reentrant=False,
            preserve_rng_state=random,
            context_fn=contexts,
        )
        return out

    return run_block


def _run_compiled(config: ModelConfig) -> RunBlock:
    # The compiler looks whether its inputs have a gradient yet, and torch takes that for a mistake of ours.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    compiled = _compile(astuple(config))

    def run_block(block: nn.Module, x: Tensor, rotation: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():
            return block(x, rotation)  # type: ignore[no-any-return]
        assert rotation is not None  # refused with a model of the user's own
        aliases = _Aliases.apply(*block.parameters())  # type: ignore[no-untyped-call]
        return compiled(aliases, x, rotation)

    return run_block


@lru_cache
def _compile(
    settings: tuple[Any, ...],
) -> Callable[[tuple[Tensor, ...], Tensor, Tensor], Tensor]:
    """The compiled block; its parameters come in the order of `Block.parameters`."""
    with torch.device("meta"):
        template = Block(ModelConfig(*settings))
    names = [name for name, _ in template.named_parameters()]

    def run(parameters: tuple[Tensor, ...], x: Tensor, rotation: Tensor) -> Tensor:
        out: Tensor = functional_call(template, dict(zip(names, parameters, strict=True)), (x, rotation))
        return out

    # `deterministic`: code is chosen by rule and not by timing, so that a resumed run computes the same bits.
    # One block is compiled and no more, so a pool of compiling processes would only have to be cleared away.
    options: dict[str, str | int | bool | Callable[..., Any]] = {"deterministic": True, "compile_threads": 1}
    return torch.compile(run, fullgraph=True, dynamic=False, options=options)


class _Aliases(torch.autograd.Function):
    """The same tensors without a `grad` of their own: the compiler refuses a bf16 parameter that gathers its
    gradient in float32. They share memory and version counter with the parameters."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients
