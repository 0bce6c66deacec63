"""Gradients of bfloat16 weights are gathered in float32 without a rounding, or a copy, in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.small_runs import Operators, Rows, ranks_of, small_config, with_experts
from torch import Tensor

from stages.config.run_config import RunConfig, changed
from stages.model import experts as experts_module
from stages.model import layers
from stages.model.experts import Experts
from stages.model.gradients import split_backward
from stages.model.gradients.split_backward import DeferredGradients, Linear, deferring
from stages.model.gradients.weight_gradient import add_product, add_rows, sums_by_token
from stages.model.gradients.whole_gradients import WholeGradients
from stages.model.grouped import add_stack_gradient
from stages.model.layers import Embedding
from stages.shape import head as chunks
from stages.shape.families import describe
from stages.shape.moe import mixture_of
from stages.trainer import replay

MICROBATCHES, ROWS, INPUTS, OUTPUTS = 8, 512, 48, 40
ONE_ROUNDING = 2**-9
"""Half a unit in the last place of bfloat16, relative."""


def factors(*shape: int) -> list[tuple[Tensor, Tensor]]:
    """Of each micro-batch, the gradient of a layer's output `(*shape, OUTPUTS)`, and its input."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(*shape, OUTPUTS, generator=generator).bfloat16(),
            torch.randn(*shape, INPUTS, generator=generator).bfloat16(),
        )
        for _ in range(MICROBATCHES)
    ]


def error(measured: Tensor, exact: Tensor) -> float:
    return float((measured.double() - exact).norm() / exact.norm())


def gathered(weight: Tensor) -> Tensor:
    """A float32 buffer for the gradient of a bfloat16 weight."""
    weight.grad_dtype = torch.float32
    weight.grad = torch.zeros_like(weight, dtype=torch.float32)
    return weight.grad


def test_products_are_added_in_float32() -> None:
    total, rounded = torch.zeros(OUTPUTS, INPUTS), torch.zeros(OUTPUTS, INPUTS)
    exact = torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64)
    for gradient, given in factors(ROWS):
        add_product(total, gradient, given)
        rounded += (gradient.t() @ given).float()
        exact += gradient.double().t() @ given.double()
    assert error(rounded, exact) > ONE_ROUNDING / 4
    # ROWS x MICROBATCHES terms are added, each to one rounding of float32.
    assert error(total, exact) < ROWS * MICROBATCHES * torch.finfo(torch.float32).eps / 100


def test_a_linear_layers_halves_add_the_bits_of_its_whole_backward() -> None:
    totals = []
    for split in (False, True):
        layer = Linear(INPUTS, OUTPUTS).bfloat16()
        with torch.no_grad():
            layer.weight.fill_(0.5)
        total, exact = gathered(layer.weight), torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64)
        of_inputs = []
        for gradient, given in factors(4, ROWS // 4):
            given = given.requires_grad_()
            deferred = DeferredGradients() if split else None
            with deferring(deferred):
                out = layer(given)
            out.backward(gradient)
            assert given.grad is not None
            of_inputs.append(given.grad)
            if deferred is not None:
                deferred.compute()
            exact += gradient.flatten(0, 1).double().t() @ given.detach().flatten(0, 1).double()
            assert torch.equal(given.grad, gradient @ layer.weight)
        assert error(total, exact) < ONE_ROUNDING / 1000
        totals.append(total)
    assert torch.equal(*totals)


def test_rows_of_a_token_are_added_in_float32() -> None:
    """One token is in every row: in bfloat16 a sum stops growing at some length."""
    tokens = torch.arange(ROWS) % 4 * (torch.arange(ROWS) % 2)
    layer, total = Embedding(4, OUTPUTS).bfloat16(), torch.zeros(4, OUTPUTS)
    exact, rounded = torch.zeros(4, OUTPUTS, dtype=torch.float64), torch.zeros(4, OUTPUTS)
    buffer = gathered(layer.weight)
    for gradient, _ in factors(ROWS):
        layer(tokens.view(4, -1)).backward(gradient.view(4, -1, OUTPUTS))
        add_rows(total, gradient, tokens)
        exact.index_add_(0, tokens, gradient.double())
        plain = torch.nn.functional.embedding(tokens, layer.weight)
        rounded += torch.autograd.grad(plain, layer.weight, gradient)[0].float()
    assert torch.equal(buffer, total)
    assert error(rounded, exact) > ONE_ROUNDING
    assert error(total, exact) < ONE_ROUNDING / 1000


def test_sums_by_token_are_those_of_a_table_of_the_vocabulary() -> None:
    """What a GPU adds: the same bits, in as many rows as there are tokens in the micro-batch."""
    generator = torch.Generator().manual_seed(0)
    for vocabulary in (3, 1000):
        tokens = torch.randint(vocabulary, (64,), generator=generator)
        rows = torch.randn(64, OUTPUTS, generator=generator)
        total = torch.randn(vocabulary, OUTPUTS, generator=generator)
        table = torch.ops.aten.embedding_dense_backward(rows, tokens, vocabulary, -1, False)
        sums, of_tokens = sums_by_token(rows, tokens)
        assert sums.shape == rows.shape
        assert torch.equal(total.index_add(0, of_tokens, sums), total + table)


def test_stacks_are_added_in_float32_and_empty_groups_get_nothing() -> None:
    ends = torch.tensor([0, 100, 100, ROWS], dtype=torch.int32)
    total = torch.zeros(4, OUTPUTS, INPUTS)
    exact = torch.zeros(4, OUTPUTS, INPUTS, dtype=torch.float64)
    for gradient, given in factors(ROWS):
        add_stack_gradient(total, gradient, given, ends)
        exact[1] += gradient[:100].double().t() @ given[:100].double()
        exact[3] += gradient[100:].double().t() @ given[100:].double()
    assert not total[0].any()
    assert not total[2].any()
    assert error(total, exact) < ONE_ROUNDING / 1000


def test_experts_halves_add_the_bits_of_their_whole_backward() -> None:
    mixture = mixture_of(with_experts(small_config(), expert_width=16).model)
    assert mixture is not None
    totals = []
    for split in (False, True):
        experts, generator = Experts(16, mixture).bfloat16(), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        buffers = [gathered(parameter) for parameter in experts.parameters()]
        x = torch.randn(2, 30, 16, generator=generator).bfloat16().requires_grad_()
        deferred = DeferredGradients() if split else None
        with deferring(deferred):
            out, _ = experts(x, torch.zeros(6))
        out.backward(torch.randn(2, 30, 16, generator=generator).bfloat16())
        if deferred is not None:
            deferred.compute()
        assert all(buffer.abs().max() > 0 for buffer in buffers)
        totals.append(buffers)
    assert all(torch.equal(whole, halves) for whole, halves in zip(*totals, strict=True))


class FloatCopies(Operators):
    """Notes the shapes of float32 tensors that an operator makes from bfloat16 ones of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def note(self, operator: Any, given: tuple[Any, ...], out: Any) -> None:
        if (
            isinstance(out, Tensor)
            and out.dtype == torch.float32
            and operator != torch.ops.aten.zeros_like.default
        ):
            narrow = [x for x in given if isinstance(x, Tensor) and x.dtype == torch.bfloat16]
            # What is written in place, a buffer, is no copy.
            if any(x.shape == out.shape for x in narrow) and not any(x is out for x in given):
                self.shapes.add(tuple(out.shape))


def run_of(case: str) -> RunConfig:
    if case == "experts":
        return with_experts(small_config("2bw", precision="bfloat16", steps=2), shared_experts=1)
    options: dict[str, Any] = {
        "recomputed": {"schedule": "2bw", "recompute": "full"},
        "recomputed selectively": {"schedule": "2bw", "recompute": "selective"},
        "split": {"schedule": "zero-bubble"},
        "tied": {"schedule": "1f1b", "stages": 1},
    }[case]
    config = small_config(precision="bfloat16", steps=2, **options)
    return changed(config, {"model.tied": case == "tied"})


def shapes_copied(config: RunConfig) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Shapes of the run's matrices and embedding, and those of them that were copied to float32; of a mixture
    of experts, those of the stacks: the rows that meet an expert may have the shape of a matrix."""
    with FloatCopies() as copies:
        replay(config, recorder=Rows())
    dimensions = 3 if config.model.experts else 2
    shapes = {p.shape for p in describe(config.model).whole() if len(p.shape) == dimensions}
    return shapes, shapes & copies.shapes


@pytest.mark.parametrize("case", ["recomputed", "recomputed selectively", "split", "tied", "experts"])
def test_no_gradient_is_copied_to_float32(case: str) -> None:
    assert shapes_copied(run_of(case))[1] == set()


def test_nor_is_that_of_a_head_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "LARGE_LOGITS", 0)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 0)
    monkeypatch.setattr(chunks, "LEAST_ROWS", 10)
    assert shapes_copied(run_of("split"))[1] == set()


@pytest.mark.parametrize("case", ["tied", "experts"])
def test_a_copy_would_be_seen(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layers, split_backward, experts_module):
        monkeypatch.setattr(module, "is_added_in_backward", lambda weight: False)
    shapes, copied = shapes_copied(run_of(case))
    assert copied == shapes


@pytest.mark.parametrize("tied", [False, True])
def test_a_reduction_in_a_backward_hears_of_gradients_that_are_whole(tied: bool) -> None:
    """Autograd reports a parameter after the backwards of all its uses, whoever adds the gradient."""
    config = small_config(stages=1, precision="bfloat16", **{"model.tied": tied})
    (rank,) = ranks_of(config)
    weights = rank.stages[0].weights
    views, parameters = weights.gradient_buffer.views, weights.newest().parameters
    seen: dict[int, list[Tensor]] = {}

    def advance(whole: int) -> None:
        seen[whole] = [view.clone() for view in views[len(views) - whole :]]

    tokens = torch.arange(24).view(2, 12)
    loss = weights.newest().module(tokens, targets=tokens)
    with WholeGradients(parameters, advance=advance).watching():
        loss.backward()
    assert len(seen) > 8
    assert max(seen) == len(views)
    for whole, gradients in seen.items():
        for early, last in zip(gradients, views[len(views) - whole :], strict=True):
            assert last.any()
            assert torch.equal(early, last)
