"""Attention within documents, against one document at a time and against explicit formulas."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.data.documents import Documents, documents_in
from stages.model import document_attention as module
from stages.model.document_attention import document_attention

BATCH, CONTEXT, WIDTH = 3, 11, 6
END = 0


def documents(*, seed: int = 0, never: bool = False) -> Documents:
    tokens = np.random.default_rng(seed).integers(0, 4, size=(BATCH, CONTEXT))
    positions, bounds = documents_in(tokens, end_of_document=-1 if never else END)
    ends = torch.from_numpy(bounds[:-1].astype(np.int32))
    return Documents(torch.from_numpy(positions), ends, torch.from_numpy(bounds))


def heads(count: int, dtype: torch.dtype, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    by_token = torch.randn(BATCH, CONTEXT, count, WIDTH, generator=generator, dtype=torch.float64)
    return by_token.to(dtype).transpose(1, 2).requires_grad_()


def masked(query: Tensor, key: Tensor, value: Tensor, within: Documents, *, scale: float) -> Tensor:
    """With the whole matrix of scores, in float64."""
    number = torch.empty(BATCH * CONTEXT, dtype=torch.int64)
    count = int(within.bounds[-1])
    for index, (start, end) in enumerate(pairwise(within.bounds[: count + 1].tolist())):
        number[start:end] = index
    number = number.view(BATCH, CONTEXT)
    seen = (number[:, :, None] == number[:, None, :]).tril()
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    scores = (query.double() @ key.double().mT * scale).masked_fill(~seen[:, None], float("-inf"))
    return scores.softmax(dim=-1) @ value.double()


def with_gradients(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return [out, *torch.autograd.grad((out.double() * weight).sum(), given)]


# float32 and bfloat16 round the inputs of float64's formulas and each product: a few units of the last place.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("kernel", ["of the CPU", "explicit"])
def test_it_is_attention_with_a_mask(
    kernel: str, key_heads: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "explicit":  # which a GPU runs where there is no kernel
        monkeypatch.setattr(module, "_has_cpu_kernel", lambda query: False)
    within, scale = documents(), 0.3
    given = [heads(count, dtype, seed=seed) for seed, count in enumerate((4, key_heads, key_heads))]
    out, _ = document_attention(*given, within.ends, within.bounds, scale)
    assert out.dtype == dtype
    measured = with_gradients(out, given)
    expected = with_gradients(masked(*given, within, scale=scale), given)
    for got, wanted in zip(measured, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted.double(), rtol=tolerance, atol=tolerance)


def test_sequences_of_one_document_have_the_bits_of_attention_without_a_mask() -> None:
    """On one thread, as runs have by default: several cut the work by the number of sequences."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _check_bits()
    finally:
        torch.set_num_threads(threads)


def _check_bits() -> None:
    given = [heads(4, torch.float32, seed=seed) for seed in range(3)]
    within = documents(never=True)
    out, _ = document_attention(*given, within.ends, within.bounds, WIDTH**-0.5)
    plain = F.scaled_dot_product_attention(*given, is_causal=True)
    for got, wanted in zip(with_gradients(out, given), with_gradients(plain, given), strict=True):
        assert torch.equal(got, wanted)


def test_the_operator_keeps_torchs_rules() -> None:
    """Shapes and strides of its fake form, and its gradients, as torch.compile relies on them."""
    within = documents()
    for key_heads in (4, 2):
        given: list[Any] = [heads(n, torch.float64, seed=n) for n in (4, key_heads, key_heads)]
        torch.library.opcheck(document_attention, (*given, within.ends, within.bounds, 0.3))
