from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from support.single_process import whole_model
from support.small_runs import small_config
from support.two_weights import microbatch_gradient
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stages.config.run_config import ModelConfig, RunConfig
from stages.model import layers
from stages.model.custom import future_seen
from stages.model.decoder import Stage, initialise, rotary_table
from stages.model.experts import Routing
from stages.model.head_loss import next_token_loss
from stages.model.layers import Attention, rotate
from stages.shape.families import FAMILIES
from stages.shape.partition import cut_of
from stages.shape.spec import head_dim

TOKENS = torch.tensor([[5, 7, 7, 250, 0, 31, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8]])


def config() -> RunConfig:
    return small_config(layers=2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 6, "logit_softcap": 5.0},
        {"parametrization": "mup", "base_width": 8, "base_layers": 2},
        {"experts": 6, "active_experts": 2, "expert_width": 12, "shared_experts": 1, "dense_layers": 1},
        {"experts": 6, "active_experts": 2, "expert_width": 12, "router_score": "softmax"},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_output_depends_on_a_later_token(family: str, changes: dict[str, Any]) -> None:
    run = small_config(layers=2, family=family)
    run = replace(run, data=replace(run.data, context=24), model=replace(run.model, init_std=0.5, **changes))
    module = whole_model(run, dtype=torch.float64)
    biases = {block: torch.zeros(run.model.experts) for block in module.expert_blocks}

    def logits(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return module(tokens, Routing(biases) if biases else None)

    assert future_seen(logits, vocabulary=256, tokens=24) is None
    later = future_seen(lambda tokens: logits(tokens).roll(-1, 1), vocabulary=256, tokens=24)
    assert later is not None
    assert "which comes later" in later


def test_the_decoder_is_what_the_formulas_say() -> None:
    """By its gradient, which `two_weights` computes with every operation written out."""
    run, targets = small_config(layers=2, **{"data.context": 8}), TOKENS.roll(-1, 1)
    module = whole_model(run, dtype=torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(8).add_(0.01)  # large enough that nothing is close to linear
    named = dict(module.named_parameters())
    weights = {name: parameter.detach() for name, parameter in named.items()}
    expected = microbatch_gradient(run, tokens=TOKENS, targets=targets, forward=weights, backward=weights)
    gradients = torch.autograd.grad(next_token_loss(module(TOKENS), targets), list(named.values()))
    for name, gradient in zip(named, gradients, strict=True):
        assert gradient.abs().max() > 1e-3, name
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-10)


def test_pairs_of_numbers_rotate_by_their_position() -> None:
    run = config()
    cosines, sines = rotary_table(run.model, context=8)
    half = head_dim(run.model) // 2
    for position, pair in product(range(8), range(2 * half)):
        angle = position * run.model.rope_base ** (-(pair % half) / half)
        found = float(cosines[position, pair]), float(sines[position, pair])
        assert found == pytest.approx((math.cos(angle), math.sin(angle)), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_are_rotated_in_float32_at_least(dtype: torch.dtype) -> None:
    run = config()
    module = Stage(run.model, cut_of(run)[0], context=4096)
    module.prepare(device=torch.device("cpu"), dtype=dtype)
    assert module.rotation is not None
    assert module.rotation.dtype is torch.float32
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4096, head_dim(run.model), generator=generator).to(dtype)
    exact = rotate(x.double(), rotary_table(run.model, context=4096))
    rotated = rotate(x, module.rotation)
    assert rotated.dtype is dtype
    # One rounding of the result, and four of products, table and sum in float32, each half a unit.
    allowed = (
        torch.finfo(dtype).eps / 2 * exact.abs() + 4 * torch.finfo(torch.float32).eps * x.double().abs().max()
    )
    assert ((rotated.double() - exact).abs() <= allowed).all()


def test_repeated_heads_are_grouped_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has no fast kernel for groups in float32."""
    run = config()
    attention = Attention(run.model)
    given = torch.randn(2, 8, run.model.width), rotary_table(run.model, context=8).float()
    grouped = attention(*given)
    monkeypatch.setattr(layers, "takes_groups", lambda query: False)
    assert torch.equal(attention(*given), grouped)


def test_a_gpu_takes_groups_in_narrow_types() -> None:
    for device, dtype, taken in (
        ("cpu", torch.float32, True),
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float32, False),
    ):
        with FakeTensorMode():
            assert layers.takes_groups(torch.empty(1, device=device, dtype=dtype)) == taken


def test_loss_is_the_mean_negative_log_likelihood_of_the_next_token() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2], [4, 3, 2]])
    by_hand = [
        -math.log(math.exp(logits[b, t, targets[b, t]]) / sum(math.exp(z) for z in logits[b, t]))
        for b in range(2)
        for t in range(3)
    ]
    torch.testing.assert_close(next_token_loss(logits, targets).item(), sum(by_hand) / 6)


def test_initial_values_depend_on_the_name_and_the_seed_alone() -> None:
    def values(name: str, seed: int) -> Tensor:
        parameter = torch.empty(64, 64)
        initialise(parameter, name=name, seed=seed, model=ModelConfig(layers=8))
        return parameter

    plain = values("blocks.0.mlp.up.weight", 0)
    assert torch.equal(plain, values("blocks.0.mlp.up.weight", 0))
    assert not torch.equal(plain, values("blocks.1.mlp.up.weight", 0))
    assert not torch.equal(plain, values("blocks.0.mlp.up.weight", 1))
    assert abs(plain.std() / 0.02 - 1) < 0.05
    assert abs(values("blocks.0.mlp.down.weight", 0).std() / (0.02 / 4) - 1) < 0.05
