"""Running a block: plainly, with activations recomputed in backward, compiled, or both.

Full recomputation runs the block a second time when its backward begins, on the same replica, so with the
weights that the backward reads. With a stash those are the forward's, and the result is the same. Without a
stash (`paci`) they are the newest: all activations inside the block are then of the newest weights, and only
its input is of the forward's. Selective recomputation is described in `stages.model.gradients.selective`.

One compilation serves all blocks of a kind, of all versions: the parameters are inputs of the compiled
function. Where matrices' gradients are not left to autograd, in a split backward or in bfloat16, there is
another. The gradients of stacks of experts are.

A compiled backward is one piece that returns gradients and nothing else. So in that other one each matrix has
two more inputs, channels, which its forward does not read. As their gradients, backward returns what the
gradient of the matrix follows from: the gradient of the layer's output, and the layer's input. An autograd
function outside of what is compiled receives them. It defers their product
(`stages.model.gradients.split_backward`), or adds it to the matrix's float32 gradient
(`stages.model.gradients.weight_gradient`).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple
from functools import lru_cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from stages.config.run_config import ModelConfig
from stages.model.decoder import RunBlock, make_block, run_as_it_stands
from stages.model.document_attention import document_attention
from stages.model.experts import ExpertBlock
from stages.model.gradients.selective import run_selectively
from stages.model.gradients.split_backward import (
    DeferredGradients,
    Linear,
    add_matrix,
    deferred_now,
    deferring,
)
from stages.model.gradients.weight_gradient import is_added_in_backward
from stages.model.grouped import order_rows, times_stack
from stages.model.layers import Block

RUN_BY = "run_by"
"""Name of a block's method that calls `run(block, *given)` within torch's hooks of `fully_shard`."""

CHANNELS = ("output_channel", "input_channel")


class _Handing(torch.autograd.Function):
    """A matrix whose backward hands out the factors of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, output_channel: Tensor, input_channel: Tensor
    ) -> Tensor:
        ctx.save_for_backward(given, weight)
        return F.linear(given, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
        given, weight = ctx.saved_tensors
        return gradient @ weight, None, gradient, given


class _HandingLinear(nn.Module):
    """In place of a `Linear`; its channels are buffers, so that `functional_call` can set them."""

    output_channel: Tensor
    input_channel: Tensor

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        for name in CHANNELS:
            self.register_buffer(name, torch.empty(0, device=weight.device))

    def forward(self, given: Tensor) -> Tensor:
        out = _Handing.apply(given, self.weight, self.output_channel, self.input_channel)  # type: ignore[no-untyped-call]
        return cast(Tensor, out)


def matrices_of(block: nn.Module) -> list[str]:
    """Names of a block's matrices whose gradients can be deferred."""
    return [name for name, module in block.named_modules() if isinstance(module, Linear)]


def hand_out(block: nn.Module) -> list[str]:
    """Replace the matrices of a block by those with channels. Returns the names of all channels, in order."""
    names = matrices_of(block)
    for name in names:
        linear = cast(Linear, block.get_submodule(name))
        holder, _, attribute = name.rpartition(".")
        setattr(block.get_submodule(holder), attribute, _HandingLinear(cast(nn.Parameter, linear.weight)))
    return [f"{name}.{channel}" for name in names for channel in CHANNELS]


def channels(block: nn.Module, x: Tensor, deferred: DeferredGradients | None) -> tuple[Tensor, ...]:
    """What a compiled block takes as its channels; they take no memory.

    Args:
        block: with the parameters whose gradients are handed out.
        x: its input, `(batch, context, width)`.
        deferred: receives the gradients; None: they are added in this backward.
    """
    weights = [cast(Linear, block.get_submodule(name)).weight for name in matrices_of(block)]
    out: tuple[Tensor, ...] = _Channels.apply(deferred, x, *weights)  # type: ignore[no-untyped-call]
    return out


class _Channels(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, deferred: DeferredGradients | None, x: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.deferred, ctx.parameters = deferred, weights
        nothing = x.new_empty(1)
        return tuple(
            nothing.expand(*x.shape[:-1], features) for weight in weights for features in weight.shape
        )

    @staticmethod
    def backward(ctx: Any, *factors: Tensor) -> tuple[None, ...]:
        for weight, gradient, given in zip(ctx.parameters, factors[::2], factors[1::2], strict=True):
            add_matrix(ctx.deferred, weight, given=given, gradient=gradient)
        return (None, None, *(None for _ in ctx.parameters))


def block_runner(config: ModelConfig, *, recompute: str, compiled: bool, sharded: bool = False) -> RunBlock:
    """The function that runs the blocks of a model in training.

    Args:
        config: the model.
        recompute: `train.recompute`.
        compiled: compile the block with torch.compile.
        sharded: blocks are under `fully_shard`, which gathers their weights when they are called.
    """
    if compiled:
        run = _run_compiled(config, selective=recompute == "selective")
        if sharded:
            run = partial(_run_within_hooks, run)
    else:
        run = run_selectively if recompute == "selective" else run_as_it_stands
    return _recomputing(run, random=config.factory is not None) if recompute == "full" else run


def _recomputing(run: RunBlock, *, random: bool) -> RunBlock:
    """Wrap `run` in activation checkpointing; `random`: the second run draws the same random numbers."""

    def run_block(block: nn.Module, *given: Any) -> Any:
        deferred = deferred_now()

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            # In a split backward the second run defers its weight gradients to the same place.
            return nullcontext(), deferring(deferred)

        # What the second run of a block of experts counts is dropped here.
        return checkpoint(
            run, block, *given, use_reentrant=False, preserve_rng_state=random, context_fn=contexts
        )

    return run_block


def _run_within_hooks(run: RunBlock, block: nn.Module, *given: Any) -> Any:
    return getattr(block, RUN_BY)(run, *given)


def _run_compiled(config: ModelConfig, *, selective: bool) -> RunBlock:
    # The compiler reads its inputs' `grad`, which makes torch warn.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    # It also makes an instance of a function with a backward of its own, such as that of the experts.
    warnings.filterwarnings("ignore", message=".*Function'> should not be instantiated")
    # It warns whoever chooses what is kept of operators in place: here are none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)

    def run_block(block: nn.Module, *given: Any) -> Any:
        if not torch.is_grad_enabled():
            return block(*given)
        assert isinstance(block, Block | ExpertBlock)  # validation refuses to compile a user's own
        deferred = deferred_now()
        handing_out = deferred is not None or is_added_in_backward(next(block.parameters()))
        compiled = _compile(
            astuple(config),
            experts=isinstance(block, ExpertBlock),
            attention=block.attention is not None,
            mlp=isinstance(block, ExpertBlock) or block.mlp is not None,
            handing_out=handing_out,
            selective=selective,
        )
        aliases = _Aliases.apply(*block.parameters())  # type: ignore[no-untyped-call]
        handed_out = channels(block, given[0], deferred) if handing_out else ()
        with deferring(None):
            return compiled(aliases, handed_out, *given)

    return run_block


@lru_cache
def _compile(settings: tuple[Any, ...], **kind: bool) -> Callable[..., Any]:
    """The compiled form of `block_function`."""
    # `deterministic`: kernels are chosen by rule, not by timing, so a resumed run computes the same bits.
    # Few blocks are compiled: a pool of compile processes has no use.
    options: dict[str, str | int | bool | Callable[..., Any]] = {"deterministic": True, "compile_threads": 1}
    return torch.compile(block_function(settings, **kind), fullgraph=True, dynamic=False, options=options)


def block_function(
    settings: tuple[Any, ...],
    *,
    experts: bool,
    attention: bool,
    mlp: bool,
    handing_out: bool,
    selective: bool,
) -> Callable[..., Any]:
    """A block, or half of one, as a function of tensors. First come its parameters, as a tuple in the order
    of `Block.parameters`, and the channels of its matrices, an empty tuple if their gradients are left to
    autograd."""
    with torch.device("meta"):
        template = make_block(ModelConfig(*settings), experts=experts, attention=attention, mlp=mlp)
    names = [name for name, _ in template.named_parameters()]
    if handing_out:
        names += hand_out(template)

    def run(parameters: tuple[Tensor, ...], handed_out: tuple[Tensor, ...], *given: Tensor) -> Any:
        own = dict(zip(names, (*parameters, *handed_out), strict=True))
        return functional_call(template, own, given)

    def run_keeping_the_dear(*given: Any) -> Any:
        return checkpoint(run, *given, use_reentrant=False, context_fn=_keep_the_dear)

    return run_keeping_the_dear if selective else run


_aten = torch.ops.aten
_DEAR = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.topk.default,
    order_rows._opoverload,
    times_stack._opoverload,
    document_attention._opoverload,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""Operators whose outputs a compiled block keeps under selective recomputation, where backward reads them."""
_keep_the_dear = partial(create_selective_checkpoint_contexts, _DEAR)


class _Aliases(torch.autograd.Function):
    """Parameters without their `grad`: the compiler refuses a bf16 parameter whose gradient is float32. They
    share memory and version counter with the parameters."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        # Else autograd makes zeros, in float32 too, and adds them, for each matrix that is handed out.
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(map(_left_to_autograd, ctx.parameters, gradients))


def _left_to_autograd(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    """The gradient where its type is that of the sum; else it is added here, without a copy in that type."""
    if gradient is None or not is_added_in_backward(parameter):
        return gradient
    assert parameter.grad is not None
    parameter.grad.add_(gradient)
    return None
