"""The orthogonalization: what it does to singular values, and that neighbours in a batch do not matter."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
import yaml
from scipy.optimize import linprog
from support.files import ROOT
from support.optimizer_references import gradients, orthogonal, parameters
from torch.utils.flop_counter import FlopCounterMode

from optimizers import declaration
from optimizers.build import build_optimizer
from optimizers.grouping import Role
from optimizers.options import orthogonal_flops
from optimizers.rules import base, muon
from optimizers.rules.muon import LOWEST, MINIMAX, orthogonalize
from stages.config.run_config import ModelConfig
from stages.shape.families import describe
from stages.shape.spec import member_shape

SHAPES = [(8, 8), (8, 24), (24, 8), (192, 96), (200, 224)]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("iteration", ["newton-schulz", "polar-express", "gram"])
def test_orthogonalizes_as_written_out(shape: tuple[int, int], iteration: str) -> None:
    matrices = draw(3, *shape, dtype=torch.float64)
    for ours, matrix in zip(orthogonalize(matrices, iteration), matrices, strict=True):
        torch.testing.assert_close(ours, orthogonal(matrix, iteration), rtol=1e-11, atol=1e-11)


def documented_ranges() -> dict[str, tuple[float, float, float]]:
    """Of each iteration in docs/optimizers.md: ends of the range, and the share of the norm it holds from."""
    row = re.compile(r"\| `([a-z-]+)`[^|]*\|[^|]*\| ([\d.]+) to ([\d.]+) \| ([\d.]+) \|")
    text = (ROOT / "docs" / "optimizers.md").read_text()
    return {name: (float(low), float(high), float(share)) for name, low, high, share in row.findall(text)}


@pytest.mark.parametrize("iteration", ["newton-schulz", "polar-express", "gram"])
def test_documented_ranges_hold_for_large_matrices(iteration: str) -> None:
    low, high, share = documented_ranges()[iteration]
    order = 8 if iteration == "gram" else 2
    # A spectrum of 768 values whose smallest is the given share of the norm; the norm depends on it.
    smallest = share
    for _ in range(50):
        spectrum = torch.logspace(math.log10(smallest), 0, 768, dtype=torch.float64)
        smallest = share * float(torch.linalg.vector_norm(spectrum, order))
    u, v = (torch.linalg.qr(matrix)[0] for matrix in draw(2, 768, 768, dtype=torch.float64))
    ended = torch.linalg.svdvals(orthogonalize(((u * spectrum) @ v).float()[None], iteration, "float32")[0])
    assert low <= float(ended.min())
    assert float(ended.max()) <= high
    # It does not hold from much less.
    below = 0.9 * share
    pair = torch.diag(torch.tensor([below, (1 - below**order) ** (1 / order)]))
    assert float(orthogonalize(pair[None], iteration, "float32")[0, 0, 0]) < low


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", [(40, 40), (41, 60), (41, 70), (24, 96)], ids=str)
@pytest.mark.parametrize("iteration", ["newton-schulz", "polar-express", "gram"])
def test_fewer_operations_give_the_same(
    iteration: str, shape: tuple[int, int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an accelerator computes: halves of symmetric products, and wide matrices by their Gram matrix."""
    monkeypatch.setattr(muon, "is_halved", lambda side: True)
    x = draw(count, *shape, dtype=torch.float64)
    x /= torch.linalg.matrix_norm(x, keepdim=True)
    as_written = muon._iterated(x, iteration, fewer=False)
    fewer = muon._iterated(x, iteration, fewer=True)
    torch.testing.assert_close(fewer, as_written, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("iteration", ["newton-schulz", "polar-express", "gram"])
@pytest.mark.parametrize("shape", [(128, 128), (128, 448)], ids=str)
@pytest.mark.parametrize("decades", [0.0, -2.0, -3.0, None], ids=str)
def test_fewer_operations_are_as_exact_in_bfloat16(
    decades: float | None, shape: tuple[int, int], iteration: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For flat spectra, spectra over decades, and one value far above all others. The distance from what is
    computed in float64 is at most twice that of the iterations as written; five iterations on one Gram
    matrix were ten and more times as far."""
    monkeypatch.setattr(muon, "is_halved", lambda side: True)
    u, _, vh = torch.linalg.svd(draw(*shape, dtype=torch.float64), full_matrices=False)
    spectrum = torch.full((shape[0],), 1e-3, dtype=torch.float64)
    spectrum[0] = 1
    if decades is not None:
        spectrum = torch.logspace(0, decades, shape[0], dtype=torch.float64)
    x = ((u * (spectrum / spectrum.norm() / 1.02)) @ vh)[None]
    exact = muon._iterated(x, iteration, fewer=False)
    as_written, fewer = (
        float((muon._iterated(x.bfloat16(), iteration, fewer=each).double() - exact).norm() / exact.norm())
        for each in (False, True)
    )
    assert fewer < 2 * as_written


@pytest.mark.parametrize("iteration", ["newton-schulz", "polar-express", "gram"])
@pytest.mark.parametrize(
    "shape", [(4096, 4096), (14336, 4096), (1024, 4096), (1024, 2048), (576, 192)], ids=str
)
def test_operations_on_an_accelerator_are_those_planned(shape: tuple[int, int], iteration: str) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.empty(2, *shape, device="meta"), iteration)
    assert counter.get_total_flops() == 2 * orthogonal_flops(*sorted(shape), iteration)


def test_documented_operations_of_an_update_are_those_of_the_model() -> None:
    template = yaml.safe_load((ROOT / "templates/models/10b.yaml").read_text())
    del template["recommended"]
    counted = [0] * 3
    for parameter in describe(ModelConfig(name="10b", **template)).whole():
        if parameter.role is Role.MATRIX:
            m, n = sorted(member_shape(parameter.shape))
            planned = (orthogonal_flops(m, n, iteration) for iteration in ("newton-schulz", "gram"))
            counts = (*planned, 5 * (4 * m * m * n + 2 * m**3))
            counted = [total + count for total, count in zip(counted, counts, strict=True)]
    newton_schulz, gram, as_written = (f"{count / 1e12:.0f}" for count in counted)
    said = " ".join((ROOT / "docs" / "optimizers.md").read_text().split())
    assert (
        f"{newton_schulz} TFLOP with `newton-schulz` where the formula as written takes {as_written}" in said
    )
    assert f"and {gram} with `gram`" in said


def test_coefficients_of_gram_are_the_best_on_their_intervals() -> None:
    """Each minimizes the largest distance from 1: a linear programme over points of the interval."""
    low, high = LOWEST, 1.0
    for coefficients in MINIMAX:
        x = np.unique(np.concatenate([np.linspace(low, high, 2000), np.geomspace(low, high, 2000)]))
        powers, ones = np.stack([x, x**3, x**5], axis=1), np.ones((len(x), 1))
        best = linprog(
            [0, 0, 0, 1],
            A_ub=np.block([[powers, -ones], [-powers, -ones]]),
            b_ub=np.concatenate([ones, -ones]),
            bounds=[(None, None)] * 3 + [(0, None)],
        )
        assert coefficients == pytest.approx(best.x[:3], rel=1e-6)
        low, high = 1 - best.x[3], 1 + best.x[3]
    assert high < 1.13


@pytest.mark.parametrize("iteration", ["newton-schulz", "gram"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_neighbours_in_a_batch_do_not_change_a_bit(
    shape: tuple[int, int], precision: str, iteration: str
) -> None:
    """Stages hold different numbers of blocks, and the result may not depend on how the model is cut."""
    matrices = draw(5, *shape)
    whole = orthogonalize(matrices, iteration, precision)
    for cut in (1, 2, 4):
        parts = [orthogonalize(part, iteration, precision) for part in (matrices[:cut], matrices[cut:])]
        assert torch.equal(torch.cat(parts), whole)


def test_bfloat16_is_coarser_and_only_taken_where_asked_for_on_a_cpu() -> None:
    matrices = draw(2, 16, 32)
    exact, auto = orthogonalize(matrices.double()), orthogonalize(matrices)
    coarse = orthogonalize(matrices, precision="bfloat16")
    assert coarse.dtype == auto.dtype == torch.float32
    assert float((auto - exact).abs().max()) < 1e-5
    assert 1e-4 < float((coarse - exact).norm() / exact.norm()) < 0.03
    assert torch.equal(orthogonalize(matrices.double(), precision="bfloat16"), exact)


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("name", ["muon", "normuon", "scion", "soap", "basis-rotation"])
def test_a_stage_alone_takes_the_steps_of_the_whole_model(name: str, width: int) -> None:
    """Bit for bit, whichever of the blocks a process holds, for odd sizes and for multiples of 8."""
    steps = gradients(4, torch.float32, widen=width)
    ends = []
    for held in ("", "blocks.1", "blocks.0.attention"):
        weights = {
            key: w for key, w in parameters(torch.float32, widen=width).items() if key.startswith(held)
        }
        optimizer = build_optimizer(weights, name=name, lr=1e-3, weight_decay=0.1, options={})
        for step in range(4):
            for key, weight in weights.items():
                weight.grad = steps[key][step].clone()
            optimizer.step()
        ends.append({key: weight.detach() for key, weight in weights.items()})
    for part in ends[1:]:
        for key, weight in part.items():
            assert torch.equal(weight, ends[0][key]), key


def test_batches_are_cut_where_they_grow_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(8, 8) for _ in range(5)] + [torch.zeros(8, 16)]
    assert base.by_shape(tensors) == [[0, 1, 2, 3, 4], [5]]
    monkeypatch.setattr(declaration, "BATCH_ENTRIES", 128)
    assert base.by_shape(tensors) == [[0, 1], [2, 3], [4], [5]]
    monkeypatch.setattr(declaration, "BATCH_ENTRIES", 1)
    assert base.by_shape(tensors) == [[0], [1], [2], [3], [4], [5]]


def test_matrices_of_odd_sizes_are_left_alone() -> None:
    assert base.by_shape([torch.zeros(8, 6), torch.zeros(8, 6)]) == [[0], [1]]
