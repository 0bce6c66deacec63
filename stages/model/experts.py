"""A block whose MLP is a mixture of experts: a router sends each token to k of E SwiGLUs.

No token is dropped, whatever the load. The router computes in float32, or in float64 where the block does.
A block of experts is a function of activations, weights and the balance bias:

    block(x, rotation, bias, documents) -> (output, load)

`bias`, float32 `(E,)`, is added to the scores for the selection alone and has no gradient. `load`, int64
`(E,)`, counts the block's tokens by chosen expert. The bias belongs to a weight version, like a weight, but
is not a parameter: whoever runs a micro-batch passes a `Routing` with the biases of the version that its
forward reads to `Stage.forward`, and finds the loads in it afterwards.

Backward does not read the bias. Recomputation reads the tensor that the forward read, so a bias is replaced
by another tensor rather than written in place. The loads of recomputation are dropped: each micro-batch is
counted once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.config.run_config import ModelConfig
from stages.data.documents import Documents
from stages.model.gradients.selective import cheap
from stages.model.gradients.split_backward import DeferredGradients, deferred_now
from stages.model.gradients.weight_gradient import is_added_in_backward
from stages.model.grouped import add_stack_gradient, computed_again, group, stack_gradient, times_stack
from stages.model.layers import MLP, Attention, RMSNorm
from stages.shape.moe import Mixture, mixture_of

_SMALLEST_SUM = 1e-20
"""Added to the sum of the chosen scores before dividing by it: all of them may be 0."""


@dataclass(frozen=True)
class Routing:
    """What routes one micro-batch through the blocks of a stage, and how it was routed."""

    biases: Mapping[int, Tensor]
    """For each block of experts, by its number in the model: its balance bias, float32 `(E,)`."""
    loads: dict[int, Tensor] = field(default_factory=dict)
    """For each block of experts: number of tokens by expert, int64 `(E,)`. Filled by the forward."""


def route(
    logits: Tensor, bias: Tensor, *, active: int, score: str, normalised: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose experts for each token (arXiv 2412.19437, section 2.1.2).

    Args:
        logits: of the router, `(tokens, E)`.
        bias: added to the scores for the selection, `(E,)`.
        active: experts for each token, k.
        score: `sigmoid`, or `softmax` over all experts.
        normalised: divide the weights of a token by their sum.
        scale: factor of the weights.

    Returns:
        Weights of the chosen experts and their numbers (int64), both `(tokens, k)`.
    """
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(dim=-1)
    chosen = (scores.detach() + bias).topk(active, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _SMALLEST_SUM)
    return weights * scale, chosen


class Router(nn.Module):
    """A matrix `(E, width)` whose products are the logits of the experts."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Logits.apply(x, self.weight))  # type: ignore[no-untyped-call]


class _Logits(torch.autograd.Function):
    """x W^T in at least float32. Backward widens the weights again: without a stash, a wide copy kept from
    forward would be of older weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _wide(x) @ _wide(weight).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        given = _wide(computed_again(x, gradient))
        return (gradient @ _wide(weight)).to(x.dtype), gradient.t() @ given


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class Experts(nn.Module):
    """Routed experts with stacked matrices, rows for outputs as in torch's linear layers.

    Parameters: `router.weight` `(E, width)`; `gate` and `up` `(E, expert width, width)`; `down`
    `(E, width, expert width)`.
    """

    def __init__(self, width: int, mixture: Mixture) -> None:
        super().__init__()
        self.mixture = mixture
        self.router = Router(width, mixture.experts)
        self.gate = nn.Parameter(torch.empty(mixture.experts, mixture.width, width))
        self.up = nn.Parameter(torch.empty(mixture.experts, mixture.width, width))
        self.down = nn.Parameter(torch.empty(mixture.experts, width, mixture.width))

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the chosen experts' outputs, weighted, and the load.

        Args:
            x: `(batch, context, width)`.
            bias: see the module.
        """
        tokens, mixture = x.flatten(0, 1), self.mixture
        weights, chosen = route(
            self.router(tokens),
            bias,
            active=mixture.active,
            score=mixture.score,
            normalised=mixture.normalised,
            scale=mixture.scale,
        )
        groups = group(chosen, mixture.experts)
        out = cast(
            Tensor,
            _Mixed.apply(  # type: ignore[no-untyped-call]
                tokens,
                weights,
                *groups[:3],
                self.gate,
                self.up,
                self.down,
                deferred_now(),
            ),
        )
        return out.view_as(x), groups.load


class _Mixed(torch.autograd.Function):
    """sum over k of weights[k] down(silu(gate x) * up x), with the matrices of the token's k-th expert.

    Backward keeps the products with gate and up, and the order of the rows; it gathers the rows and computes
    the hidden values again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        order: Tensor,
        places: Tensor,
        ends: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        deferred: DeferredGradients | None,
    ) -> Tensor:
        rows = x[order // weights.shape[-1]]
        gated, upped = times_stack(rows, gate.mT, ends), times_stack(rows, up.mT, ends)
        hidden = F.silu(gated) * upped * _by_row(weights, order, x.dtype)
        ctx.save_for_backward(x, weights, order, places, ends, gated, upped, gate, up, down)
        ctx.deferred = deferred
        ctx.wide = is_added_in_backward(gate)
        if deferred is not None or ctx.wide:
            # Recomputation returns other tensors for saved ones; their grads would be lost.
            ctx.stacks = (gate, up, down)
        return _summed(times_stack(hidden, down.mT, ends), places, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, order, places, ends, gated, upped, gate, up, down = ctx.saved_tensors
        x, weights = (computed_again(kept, gradient) for kept in (x, weights))
        tokens = order // weights.shape[-1]
        of_output = gradient[tokens]
        of_scaled = times_stack(of_output, down, ends)
        by_row, activated = _by_row(weights, order, x.dtype), F.silu(gated)
        unweighted = activated * upped
        of_weights = (_wide(of_scaled) * _wide(unweighted)).sum(dim=-1)[places].view_as(weights)
        of_hidden = of_scaled * by_row
        of_gated = torch.ops.aten.silu_backward(of_hidden * upped, gated)
        of_upped = of_hidden * activated
        of_rows = times_stack(of_gated, gate, ends) + times_stack(of_upped, up, ends)
        of_x = _summed(of_rows, places, weights)
        hidden = unweighted * by_row
        nothing = (None,) * 7
        if ctx.deferred is not None:
            ctx.deferred.leave(ctx.stacks[:2], _add_input_stacks, of_gated, of_upped, x, tokens, ends)
            ctx.deferred.leave(ctx.stacks[2:], _add_output_stack, gradient, hidden, tokens, ends)
            return of_x, of_weights, *nothing
        rows = x[tokens]
        factors = ((of_gated, rows), (of_upped, rows), (of_output, hidden))
        if ctx.wide:
            for stack, (given, of_stack) in zip(ctx.stacks, factors, strict=True):
                add_stack_gradient(stack.grad, given, of_stack, ends)
            return of_x, of_weights, *nothing
        of_stacks = [stack_gradient(given, of_stack, ends) for given, of_stack in factors]
        return of_x, of_weights, None, None, None, *of_stacks, None


def _add_input_stacks(
    gate: Tensor, up: Tensor, of_gated: Tensor, of_upped: Tensor, x: Tensor, tokens: Tensor, ends: Tensor
) -> None:
    """From the gradients of the products, by row, and the input, by token, which is gathered once."""
    rows = x[tokens]
    add_stack_gradient(gate, of_gated, rows, ends)
    add_stack_gradient(up, of_upped, rows, ends)


def _add_output_stack(down: Tensor, gradient: Tensor, hidden: Tensor, tokens: Tensor, ends: Tensor) -> None:
    """From the gradient of the output, by token, and the weighted hidden values, by row."""
    add_stack_gradient(down, gradient[tokens], hidden, ends)


def _by_row(weights: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """Each row's weight, `(tokens * k, 1)`."""
    return weights.flatten()[order].to(dtype)[:, None]


def _summed(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Add up the rows of each token, `(tokens, columns)`: in the order of its experts, not of the rows."""
    return rows[places].view(*weights.shape, -1).sum(dim=1)


class ExpertBlock(nn.Module):
    """Attention and experts, each behind its norm, each added to the residual stream; shared experts are an
    MLP beside the routed ones. Where a stage begins with the experts, attention is None."""

    def __init__(self, config: ModelConfig, *, attention: Attention | None) -> None:
        super().__init__()
        mixture = mixture_of(config)
        assert mixture is not None
        self.attention_norm = None if attention is None else RMSNorm(config.width, config.norm_eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.experts = Experts(config.width, mixture)
        self.shared = MLP(config.width, mixture.shared_width) if mixture.shared_width else None

    def forward(
        self, x: Tensor, rotation: Tensor, bias: Tensor, documents: Documents | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.attention is not None and self.attention_norm is not None:
            x = x + self.attention(cheap(self.attention_norm, x), rotation, documents)
        given = cheap(self.mlp_norm, x)
        out, load = self.experts(given, bias)
        if self.shared is not None:
            out = out + self.shared(given)
        return x + out, load
