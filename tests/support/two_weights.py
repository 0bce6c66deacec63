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

from stages.config.run_config import RunConfig
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
    """`x W^T` or, for a vector, `x w`; the gradient of x uses the backward's weight, and that of the weight
    uses `again` in place of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, again: Tensor, leaf: Tensor, forward: Tensor, backward: Tensor
    ) -> Tensor:
        ctx.save_for_backward(again, backward)
        return x @ forward.t() if forward.ndim == 2 else x * forward

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
        again, weight = ctx.saved_tensors
        flat, input_ = gradient.flatten(0, -2), again.flatten(0, -2)
        if weight.ndim == 2:
            return gradient @ weight, None, flat.t() @ input_, None, None
        return gradient * weight, None, (flat * input_).sum(0), None, None


def _product(x: Tensor, weight: WeightPair, *, again: Tensor | None = None) -> Tensor:
    seen = x if again is None else again
    out: Tensor = _Product.apply(x, seen.detach(), weight.leaf, weight.forward, weight.backward)
    return out


def _norm(x: Tensor, weight: WeightPair, eps: float, *, selective: bool = False) -> tuple[Tensor, Tensor]:
    """Its output, and the one that the matrices behind it see in backward."""
    wide = x.float() if x.dtype == torch.bfloat16 else x
    scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    out = _product(scaled, weight)
    return out, scaled * weight.backward if selective else out


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    # In bfloat16 the product with a float32 table is float32.
    return (x * rotation[0] + torch.cat((-second, first), dim=-1) * rotation[1]).to(x.dtype)


def _block(x: Tensor, w: Mapping[str, WeightPair], config: RunConfig, rotation: Tensor) -> Tensor:
    """With selective recomputation, norms run again with the backward's weights; they are the only cheap
    parts with weights."""
    selective = config.train.recompute == "selective"
    model = config.model
    batch, context, width = x.shape
    wide = model.width // model.heads

    def heads(projected: Tensor) -> Tensor:
        split = projected.view(batch, context, -1, wide).transpose(1, 2)
        return split.repeat_interleave(model.heads // split.shape[1], dim=1)

    normed, again = _norm(x, w["attention_norm.weight"], model.norm_eps, selective=selective)
    query = _rotated(heads(_product(normed, w["attention.query.weight"], again=again)), rotation)
    key = _rotated(heads(_product(normed, w["attention.key.weight"], again=again)), rotation)
    value = heads(_product(normed, w["attention.value.weight"], again=again))
    scores = (query @ key.transpose(-1, -2)).double() / wide**0.5
    hidden = torch.ones(context, context, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(x.dtype) @ value
    mixed = mixed.transpose(1, 2).reshape(batch, context, width)
    x = x + _product(mixed, w["attention.output.weight"])
    normed, again = _norm(x, w["mlp_norm.weight"], model.norm_eps, selective=selective)
    if "experts.gate" in w:
        return x + _experts(normed.flatten(0, 1), again.flatten(0, 1), w, config).view_as(x)
    gate = _product(normed, w["mlp.gate.weight"], again=again)
    inner = F.silu(gate) * _product(normed, w["mlp.up.weight"], again=again)
    return x + _product(inner, w["mlp.down.weight"])


def _experts(x: Tensor, again: Tensor, w: Mapping[str, WeightPair], config: RunConfig) -> Tensor:
    """Every expert on every token; without a balance bias. A token's weight is 0 where it is not sent."""
    router = w["experts.router.weight"].wide()
    dtype = router.forward.dtype
    scores = _product(x.to(dtype), router, again=again.to(dtype)).sigmoid()
    assert config.model.active_experts is not None
    chosen = scores.detach().topk(config.model.active_experts).indices
    sent = torch.zeros_like(scores).scatter(1, chosen, 1.0)
    weights = scores * sent / (scores * sent).sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(config.model.experts):
        gate, up, down = (w[f"experts.{name}"][expert] for name in ("gate", "up", "down"))
        inner = F.silu(_product(x, gate, again=again)) * _product(x, up, again=again)
        inner = inner * weights[:, expert, None].to(x.dtype)
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
) -> dict[str, Tensor]:
    """Gradient of one micro-batch's loss, by parameter name.

    Args:
        config: The run's configuration; `train.recompute` says what backward computes with its own weights.
        tokens: Tokens of the micro-batch.
        targets: Targets of the micro-batch.
        forward: Weights of the forward, by parameter name.
        backward: Weights of the backward, by parameter name.
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
        if config.train.recompute == "full":
            leaves = [two.leaf for two in of_block.values()]
            x = _Recomputed.apply(x, config, rotation, of_block, *leaves)
        else:
            x = _block(x, of_block, config, rotation)
    logits = _product(_norm(x, w["norm.weight"], config.model.norm_eps)[0], w["head.weight"])
    inputs = [embedding if name == "embedding.weight" else two.leaf for name, two in w.items()]
    gradients = torch.autograd.grad(next_token_loss(logits, targets), inputs)
    return dict(zip(w, gradients, strict=True))
