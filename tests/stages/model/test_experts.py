"""Blocks of experts against a loop over tokens, written with plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.config.run_config import ModelConfig
from stages.model import experts as experts_module
from stages.model import grouped
from stages.model.decoder import initialise, make_block, rotary_table
from stages.model.experts import ExpertBlock, Experts, route
from stages.model.gradients.split_backward import DeferredGradients, deferring
from stages.model.runner import block_runner
from stages.shape.moe import Mixture, mixture_of

MODEL = ModelConfig(
    name="m",
    layers=2,
    width=16,
    heads=2,
    kv_heads=1,
    mlp_width=24,
    experts=8,
    active_experts=2,
    expert_width=12,
)
SKEW = torch.tensor([4.0, 2.0, 1.0, 0.5, 0.0, 0.0, -9.0, -9.0])
"""A bias under which some experts get no token."""


def seeded(module: torch.nn.Module, dtype: torch.dtype) -> None:
    module.to(dtype)
    for name, parameter in module.named_parameters():
        initialise(parameter, name=f"blocks.0.experts.{name}", seed=0, model=ModelConfig(layers=2))
        with torch.no_grad():
            parameter *= 20


def experts_of(config: ModelConfig, dtype: torch.dtype) -> Experts:
    mixture = mixture_of(config)
    assert mixture is not None
    module = Experts(config.width, mixture)
    seeded(module, dtype)
    return module


def inputs(dtype: torch.dtype) -> Tensor:
    x = torch.randn(3, 7, MODEL.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def token_by_token(module: Experts, x: Tensor, bias: Tensor) -> Tensor:
    """What the block's experts compute, for one token and one expert after the other."""
    mixture, out = module.mixture, []
    for token in x.flatten(0, 1):
        logits = module.router.weight @ token
        scores = torch.sigmoid(logits) if mixture.score == "sigmoid" else torch.softmax(logits, 0)
        chosen = sorted(range(mixture.experts), key=lambda e: -float(scores[e].detach() + bias[e]))[
            : mixture.active
        ]
        total = sum(scores[e] for e in chosen) if mixture.normalised else 1.0
        out.append(
            sum(
                mixture.scale
                * scores[e]
                / total
                * (module.down[e] @ (F.silu(module.gate[e] @ token) * (module.up[e] @ token)))
                for e in chosen
            )
        )
    return torch.stack(out).view_as(x)


def gradients(run: Callable[[Tensor], Tensor], module: torch.nn.Module, x: Tensor) -> list[Tensor]:
    out = run(x)
    # The upstream gradient of a sum is expanded from one number: it has strides of 0.
    return [out, *torch.autograd.grad(out.sum() + (out**2).sum(), [x, *module.parameters()])]


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("active", [1, 3, 8])
def test_experts_compute_what_a_loop_over_tokens_computes(score: str, normalised: bool, active: int) -> None:
    config = replace(
        MODEL, router_score=score, route_normalised=normalised, active_experts=active, route_scale=2.5
    )
    module, x = experts_of(config, torch.float64), inputs(torch.float64)
    measured = gradients(lambda x: module(x, SKEW)[0], module, x)
    expected = gradients(lambda x: token_by_token(module, x, SKEW), module, x)
    for ours, theirs in zip(measured, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    load = module(x, SKEW)[1]
    assert load.dtype == torch.int64
    assert int(load.sum()) == 21 * active
    assert bool((load == 0).any()) == (active < 8)


def test_the_bias_selects_and_does_not_weigh() -> None:
    logits = torch.randn(5, 8)
    settings: dict[str, Any] = {"active": 8, "score": "softmax", "normalised": False, "scale": 1.0}
    weights, chosen = route(logits, SKEW, **settings)
    torch.testing.assert_close(torch.zeros(5, 8).scatter(1, chosen, weights), logits.softmax(-1))
    _, first = route(logits, SKEW * 100, **(settings | {"active": 1}))
    assert first.flatten().tolist() == [0] * 5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_grouped_products_are_those_of_the_loop(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-6 of the largest value in float32; bfloat16 has 8 bits."""
    config = replace(MODEL, expert_width=24)
    module, x = experts_of(config, dtype), inputs(dtype)
    assert grouped.is_grouped(dtype, 16, 24)
    measured = gradients(lambda x: module(x, SKEW)[0], module, x)
    monkeypatch.setattr(grouped, "is_grouped", lambda *given: False)
    expected = gradients(lambda x: module(x, SKEW)[0], module, x)
    for ours, theirs in zip(measured, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * float(theirs.detach().abs().max()))


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_split_backward_gives_the_same_gradients(shared: int, recompute: str) -> None:
    config = replace(MODEL, shared_experts=shared)
    block = make_block(config, experts=True)
    seeded(block, torch.float64)
    rotation, bias = rotary_table(config, context=7), SKEW
    x = inputs(torch.float64)
    run = block_runner(config, recompute=recompute, compiled=False)
    whole = gradients(lambda x: run(block, x, rotation, bias)[0], block, x)
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x.grad = torch.zeros_like(x)
    deferred = DeferredGradients()
    with deferring(deferred):
        out, load = run(block, x, rotation, bias)
    (out.sum() + (out**2).sum()).backward()
    assert isinstance(block, ExpertBlock)
    assert not block.experts.gate.grad.any()  # type: ignore[union-attr]
    deferred.compute()
    assert int(load.sum()) == 42
    for ours, theirs in zip([x, *block.parameters()], whole[1:], strict=True):
        torch.testing.assert_close(ours.grad, theirs, rtol=1e-12, atol=1e-12)


def test_each_expert_is_drawn_under_its_own_name() -> None:
    stack = torch.empty(4, 6, 8)
    initialise(stack, name="blocks.1.experts.down", seed=3, model=ModelConfig(layers=8))
    for expert in range(4):
        alone = torch.empty(6, 8)
        initialise(alone, name=f"blocks.1.experts.down.{expert}", seed=3, model=ModelConfig(layers=8))
        assert torch.equal(stack[expert], alone)
    assert not torch.equal(stack[0], stack[1])
    wide = torch.empty(2, 100, 100)
    initialise(wide, name="blocks.1.experts.down", seed=3, model=ModelConfig(layers=8))
    assert float(wide.std()) == pytest.approx(0.02 / 4, rel=0.05)
    initialise(wide, name="blocks.1.experts.up", seed=3, model=ModelConfig(layers=8))
    assert float(wide.std()) == pytest.approx(0.02, rel=0.05)


def test_the_router_computes_in_float32_and_backward_reads_the_weights_that_are_there() -> None:
    router = experts_module.Router(16, 8)
    seeded(router, torch.bfloat16)
    x = inputs(torch.bfloat16).flatten(0, 1).detach().requires_grad_()
    logits = router(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ router.weight.float().t())
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(router.weight):
        router.weight.fill_(1.0)
    logits.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 8.0))


def test_settings_have_their_defaults() -> None:
    assert mixture_of(replace(MODEL, experts=0)) is None
    assert mixture_of(replace(MODEL, shared_experts=3)) == Mixture(
        experts=8,
        active=2,
        width=12,
        shared_width=36,
        dense_layers=0,
        score="sigmoid",
        normalised=True,
        scale=1.0,
        balance="bias",
        balance_rate=1e-3,
    )
