"""Reference gradient of one micro-batch, with different weights in forward and backward.

The decoder is written out again. Every operation with a weight gets both versions of it; the rest is plain
autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.config import RunConfig
from stages.model.decoder import rotary_table
from stages.model.head_loss import next_token_loss


@dataclass(frozen=True)
class WeightPair:
    """The weight of the forward and that of the backward. Its gradient accumulates in `leaf`."""

    forward: Tensor
    backward: Tensor
    leaf: Tensor

    @classmethod
    def of(cls, forward: Tensor, backward: Tensor) -> WeightPair:
        return cls(forward, backward, torch.zeros_like(forward).requires_grad_())

    def __getitem__(self, expert: int) -> WeightPair:
        """One matrix of a stack."""
        return WeightPair(self.forward[expert], self.backward[expert], self.leaf[expert])

    def wide(self) -> WeightPair:
        """In at least float32."""
        dtype = torch.promote_types(self.forward.dtype, torch.float32)
        return WeightPair(self.forward.to(dtype), self.backward.to(dtype), self.leaf.to(dtype))


class _Product(torch.autograd.Function):
    """`x W^T` or, for a vector, `x w`; the gradient of x uses the backward's weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor, forward: Tensor, backward: Tensor) -> Tensor:
        ctx.save_for_backward(x, backward)
        return x @ forward.t() if forward.ndim == 2 else x * forward

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        flat, input_ = gradient.flatten(0, -2), x.flatten(0, -2)
        if weight.ndim == 2:
            return gradient @ weight, flat.t() @ input_, None, None
        return gradient * weight, (flat * input_).sum(0), None, None


def _product(x: Tensor, weight: WeightPair) -> Tensor:
    out: Tensor = _Product.apply(x, weight.leaf, weight.forward, weight.backward)
    return out


def _norm(x: Tensor, weight: WeightPair, eps: float) -> Tensor:
    wide = x.float() if x.dtype == torch.bfloat16 else x
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return _product(scaled.to(x.dtype), weight)


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    # In bfloat16 the product with a float32 table is float32.
    return (x * rotation[0] + torch.cat((-second, first), dim=-1) * rotation[1]).to(x.dtype)


def _block(x: Tensor, w: Mapping[str, WeightPair], config: RunConfig, rotation: Tensor) -> Tensor:
    model = config.model
    batch, context, width = x.shape
    wide = model.width // model.heads

    def heads(projected: Tensor) -> Tensor:
        split = projected.view(batch, context, -1, wide).transpose(1, 2)
        return split.repeat_interleave(model.heads // split.shape[1], dim=1)

    normed = _norm(x, w["attention_norm.weight"], model.norm_eps)
    query = _rotated(heads(_product(normed, w["attention.query.weight"])), rotation)
    key = _rotated(heads(_product(normed, w["attention.key.weight"])), rotation)
    value = heads(_product(normed, w["attention.value.weight"]))
    scores = (query @ key.transpose(-1, -2)).double() / wide**0.5
    hidden = torch.ones(context, context, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(x.dtype) @ value
    mixed = mixed.transpose(1, 2).reshape(batch, context, width)
    x = x + _product(mixed, w["attention.output.weight"])
    normed = _norm(x, w["mlp_norm.weight"], model.norm_eps)
    if "experts.gate" in w:
        return x + _experts(normed.flatten(0, 1), w, config).view_as(x)
    inner = F.silu(_product(normed, w["mlp.gate.weight"])) * _product(normed, w["mlp.up.weight"])
    return x + _product(inner, w["mlp.down.weight"])


def _experts(x: Tensor, w: Mapping[str, WeightPair], config: RunConfig) -> Tensor:
    """Every expert on every token; without a balance bias. A token's weight is 0 where it is not sent."""
    router = w["experts.router.weight"].wide()
    scores = _product(x.to(router.forward.dtype), router).sigmoid()
    assert config.model.active_experts is not None
    chosen = scores.detach().topk(config.model.active_experts).indices
    sent = torch.zeros_like(scores).scatter(1, chosen, 1.0)
    weights = scores * sent / (scores * sent).sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(config.model.experts):
        gate, up, down = (w[f"experts.{name}"][expert] for name in ("gate", "up", "down"))
        inner = F.silu(_product(x, gate)) * _product(x, up) * weights[:, expert, None].to(x.dtype)
        out = out + _product(inner, down)
    return out


class _Recomputed(torch.autograd.Function):
    """A block whose backward recomputes it from its input, with the backward's weights only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, config: RunConfig, rotation: Tensor, w: Any, *leaves: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.rest = (config, rotation, w)
        return _block(x, w, config, rotation)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        config, rotation, w = ctx.rest
        again = {name: WeightPair.of(two.backward, two.backward) for name, two in w.items()}
        with torch.enable_grad():
            input_ = x.detach().requires_grad_()
            out = _block(input_, again, config, rotation)
            leaves = [two.leaf for two in again.values()]
            of_x, *of_weights = torch.autograd.grad(out, [input_, *leaves], gradient)
        return (of_x, None, None, None, *of_weights)


def microbatch_gradient(
    config: RunConfig,
    *,
    tokens: Tensor,
    targets: Tensor,
    forward: Mapping[str, Tensor],
    backward: Mapping[str, Tensor],
    recompute: bool,
) -> dict[str, Tensor]:
    """Gradient of one micro-batch's loss, by parameter name.

    Args:
        config: The run's configuration.
        tokens: Tokens of the micro-batch.
        targets: Targets of the micro-batch.
        forward: Weights of the forward, by parameter name.
        backward: Weights of the backward, by parameter name.
        recompute: Whether the backward recomputes blocks with its own weights.
    """
    w = {name: WeightPair.of(forward[name], backward[name]) for name in forward}
    dtype = forward["embedding.weight"].dtype
    rotation = rotary_table(config.model, context=config.data.context)
    rotation = rotation.to(torch.promote_types(dtype, torch.float32))
    embedding = forward["embedding.weight"].clone().requires_grad_()
    x = F.embedding(tokens, embedding)
    for index in range(config.model.layers):
        prefix = f"blocks.{index}."
        of_block = {name.removeprefix(prefix): two for name, two in w.items() if name.startswith(prefix)}
        if recompute:
            leaves = [two.leaf for two in of_block.values()]
            x = _Recomputed.apply(x, config, rotation, of_block, *leaves)
        else:
            x = _block(x, of_block, config, rotation)
    logits = _product(_norm(x, w["norm.weight"], config.model.norm_eps), w["head.weight"])
    inputs = [embedding if name == "embedding.weight" else two.leaf for name, two in w.items()]
    gradients = torch.autograd.grad(next_token_loss(logits, targets), inputs)
    return dict(zip(w, gradients, strict=True))
