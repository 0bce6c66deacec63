"""The loss in chunks against the plain form: loss, gradients, memory, and when it is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.planned import check_as_planned
from support.single_process import check_against_one_process, whole_model
from support.small_runs import replayed, small_config
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from asyncpp_cli.planner.costs.devices import find_device
from asyncpp_cli.planner.costs.roofline import Roofline
from asyncpp_cli.planner.peak_memory import forward_bytes
from stages.config.run_config import RunConfig, changed
from stages.memory.estimate import head_chunk_rows
from stages.model.gradients.split_backward import DeferredGradients, Linear, deferring
from stages.model.head_loss import head_loss, next_token_loss
from stages.model.head_shard import HeadShard, merge_parts
from stages.shape import head as chunks
from stages.shape.head import chunk_rows
from stages.shape.partition import cut_of


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head is computed in chunks of 8 rows."""
    monkeypatch.setattr(chunks, "LARGE_LOGITS", 0)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 0)
    monkeypatch.setattr(chunks, "GPU_CHUNK_BYTES", 0)
    monkeypatch.setattr(chunks, "LEAST_ROWS", 8)


def head_and_batch(dtype: torch.dtype) -> tuple[Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = Linear(16, 96).to(dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(96, 16, generator=generator))
    x = torch.randn(3, 20, 16, generator=generator).to(dtype).requires_grad_()
    return head, x, torch.randint(96, (3, 20), generator=generator)


def gradients(
    loss: Callable[[Linear, Tensor, Tensor], Tensor], dtype: torch.dtype, *, exact: bool = False
) -> list[Tensor]:
    """The loss, and a quarter of the gradients of input and matrix; that of the matrix in at least float32.

    `exact`: computed in float64 from what was rounded to `dtype`.
    """
    head, x, targets = head_and_batch(dtype)
    if exact:
        head, x, dtype = head.double(), x.detach().double().requires_grad_(), torch.float64
    buffer = torch.zeros(96, 16, dtype=torch.promote_types(dtype, torch.float32))
    head.weight.grad_dtype = buffer.dtype
    head.weight.grad = buffer
    value = loss(head, x, targets)
    (value / 4).backward()
    assert x.grad is not None
    return [value.detach(), x.grad, buffer]


def plain(head: Linear, x: Tensor, targets: Tensor) -> Tensor:
    return next_token_loss(head(x), targets)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_loss_and_gradients_are_those_of_whole_logits(
    dtype: torch.dtype, bound: float, small_chunks: None
) -> None:
    for measured, expected in zip(gradients(head_loss, dtype), gradients(plain, dtype), strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(measured, expected, rtol=bound, atol=bound)


def test_in_bfloat16_loss_and_gradients_are_as_exact_as_of_whole_logits(small_chunks: None) -> None:
    exact = gradients(plain, torch.bfloat16, exact=True)
    chunked, whole = (gradients(loss, torch.bfloat16) for loss in (head_loss, plain))
    assert chunked[0].dtype == chunked[2].dtype == torch.float32
    assert not torch.equal(chunked[2], chunked[2].bfloat16().float())
    for form, reference, truth in zip(chunked, whole, exact, strict=True):
        error, of_plain = (float((value.double() - truth.double()).norm()) for value in (form, reference))
        assert error <= 1.1 * of_plain + 1e-6


def test_confident_tokens_have_gradients_as_exact_in_shards_as_in_a_whole_head(small_chunks: None) -> None:
    """In bfloat16, where a probability near 1 has no digit left for what is missing: a mean loss of 0.001."""
    generator = torch.Generator().manual_seed(0)
    weight = (4 * F.normalize(torch.randn(96, 16, generator=generator), dim=-1)).bfloat16()
    targets = torch.randint(96, (3, 20), generator=generator)
    x = (1.3 * weight[targets].float() + 0.1 * torch.randn(3, 20, 16, generator=generator)).bfloat16()

    def of_shards(dtype: torch.dtype) -> tuple[Tensor, ...]:
        shards = [HeadShard(16, rows).to(dtype) for rows in (range(40), range(40, 96))]
        for shard in shards:
            shard.weight.data.copy_(weight[shard.rows.start : shard.rows.stop])
        parts, kept = zip(*(shard.run(x.to(dtype), targets) for shard in shards), strict=True)
        merged = merge_parts(parts, scale=1.0)
        factors = [
            shard.gradient_factors(one, merged.sums, scale=1.0)
            for shard, one in zip(shards, kept, strict=True)
        ]
        return (
            merged.loss,
            merged.gradient,
            torch.cat([a.double().mT @ b.double() for a, b in factors]).detach(),
        )

    def of_whole(loss: Callable[[Linear, Tensor, Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        head, given = Linear(16, 96).to(dtype), x.to(dtype).requires_grad_()
        head.weight.data.copy_(weight)
        head.weight.grad_dtype = torch.promote_types(dtype, torch.float32)
        value = loss(head, given, targets)
        value.backward()
        assert given.grad is not None
        assert head.weight.grad is not None
        return value.detach(), given.grad, head.weight.grad

    truth = of_whole(plain, torch.float64)
    assert 5e-4 < float(truth[0]) < 2e-3
    for exact, expected in zip(of_shards(torch.float64), truth, strict=True):
        torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-14)
    forms = of_whole(plain, torch.bfloat16), of_whole(head_loss, torch.bfloat16), of_shards(torch.bfloat16)
    for reference, chunked, shards, exact in zip(*forms, truth, strict=True):
        of_plain, of_chunked, of_sharded = (
            float((form.double() - exact).norm() / exact.norm()) for form in (reference, chunked, shards)
        )
        assert of_sharded < 1.1 * of_plain > of_chunked, (of_plain, of_chunked, of_sharded)


def test_a_split_backward_defers_the_gradient_of_the_matrix(small_chunks: None) -> None:
    head, x, targets = head_and_batch(torch.float64)
    head.weight.grad = torch.zeros_like(head.weight)
    deferred = DeferredGradients()
    with deferring(deferred):
        loss = head_loss(head, x, targets)
    (loss / 4).backward()
    assert not head.weight.grad.any()
    assert [tuple(tensor.shape) for tensor in deferred.kept()] == [(96, 16)]
    deferred.compute()
    _, of_input, of_matrix = gradients(plain, torch.float64)
    torch.testing.assert_close(x.grad, of_input, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(head.weight.grad, of_matrix, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("schedule", "stages", "split", "tied", "delay"),
    [("2bw", 2, False, False, 1), ("zero-bubble", 2, False, False, 0), ("2bw-v", 2, True, True, 1)],
)
def test_a_run_in_chunks_is_that_of_one_process_with_whole_logits(
    schedule: str, stages: int, split: bool, tied: bool, delay: int, small_chunks: None
) -> None:
    config = small_config(
        schedule, stages=stages, split=split, microbatches=4, layers=4, precision="float64", clip_norm=0.5
    )
    config = changed(config, {"model.tied": tied})
    assert head_chunk_rows(config) == 8
    check_against_one_process(config, delay=delay)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("schedule", ["2bw", "gpipe", "zero-bubble"])
def test_memory_is_what_the_plan_says(schedule: str, precision: str, small_chunks: None) -> None:
    settings: dict[str, Any] = {"microbatches": 3, "layers": 2, "steps": 2, "eval_interval": 9}
    check_as_planned(small_config(schedule, precision=precision, **settings))


def test_small_and_wide_heads_stay_whole() -> None:
    def rows(tokens: int, width: int, vocabulary: int, *, on_gpu: bool = False) -> int | None:
        return chunk_rows(tokens=tokens, width=width, vocabulary=vocabulary, wide=4, on_gpu=on_gpu)

    assert rows(8 * 128, 128, 256) is None  # the quickstart
    assert rows(4 * 128, 576, 49152) is None
    assert rows(2**14, 576, 49152) == 640
    assert rows(8192, 4096, 128256) == 256
    assert rows(8192, 4096, 128256, on_gpu=True) == 2048
    # The matrix's gradient would take more than the logits.
    assert rows(2048, 4096, 49152) is None


def test_the_plan_knows_the_chunks_of_a_gpu() -> None:
    """A chunk is 1 GiB of logits, held twice; the matrix's gradient is added once per chunk."""
    config = small_config("2bw", precision="bfloat16")
    config = changed(
        config,
        {"model.vocab_size": 2**17, "data.context": 2**13, "train.microbatch_size": 1, "model.width": 4096},
    )
    cut = cut_of(config)[-1]
    temporary, seconds = {}, {}
    for device, rows in (("cpu", 256), ("cuda", 2048)):
        config = changed(config, {"site.device": device})
        assert head_chunk_rows(config) == rows
        temporary[device] = forward_bytes(config, cut)
        seconds[device] = Roofline(find_device("h100", key="")).parts(config).head.forward
    assert temporary["cuda"] == 2 * 2**30 > temporary["cpu"]
    fewer_chunks = 2**13 // 256 - 2**13 // 2048
    bandwidth = find_device("h100", key="").bandwidth_gbs * 1e9
    saved = fewer_chunks * 2 * 2**17 * 4096 * 4 / bandwidth
    assert seconds["cpu"] - seconds["cuda"] == pytest.approx(saved)


def test_a_users_own_head_stays_whole(small_chunks: None) -> None:
    config: RunConfig = small_config()
    assert head_chunk_rows(config) == 8
    config = changed(config, {"model.factory": "models:mine"})
    assert head_chunk_rows(config) is None


@pytest.mark.slow
def test_the_peak_is_a_third_at_most() -> None:
    """4k tokens x 32k vocabulary: whole logits are 512 MiB."""

    def peak(loss: Callable[[Linear, Tensor, Tensor], Tensor]) -> int:
        head = Linear(32, 2**15)
        head.weight.grad = torch.zeros_like(head.weight)
        x = torch.randn(4, 1024, 32, requires_grad=True)
        targets = torch.randint(2**15, (4, 1024))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            loss(head, x, targets).backward()
        assert measured.profiler is not None
        allocated = most = 0
        events = measured.profiler.kineto_results.events()
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                allocated += event.nbytes()
                most = max(most, allocated)
        return most

    whole, chunked = peak(plain), peak(head_loss)
    assert whole > 2 * 2**29
    assert chunked <= whole / 3


def with_terms(head: Linear, x: Tensor, targets: Tensor) -> Tensor:
    return head_loss(head, x, targets, softcap=CAP, z_loss=Z_LOSS)


def plain_with_terms(head: Linear, x: Tensor, targets: Tensor) -> Tensor:
    """What is minimized, term by term, with plain autograd."""
    logits = CAP * torch.tanh(head(x) / CAP)
    log_sums = torch.log(torch.exp(logits).sum(dim=-1))
    penalty = Z_LOSS * (log_sums**2).mean()
    return next_token_loss(logits, targets) + penalty - penalty.detach()


CAP, Z_LOSS = 5.0, 0.1
"""Of logits of about 4, and as large a term that a wrong factor shows."""


@pytest.mark.parametrize("chunks", [False, True])
def test_a_cap_and_a_z_loss_are_what_autograd_makes_of_their_formulas(
    chunks: bool, request: pytest.FixtureRequest
) -> None:
    if chunks:
        request.getfixturevalue("small_chunks")
    measured, expected = gradients(with_terms, torch.float64), gradients(plain_with_terms, torch.float64)
    for form, reference, without in zip(measured, expected, gradients(plain, torch.float64), strict=True):
        torch.testing.assert_close(form, reference, rtol=1e-13, atol=1e-14)
        assert (form - without).abs().max() > 1e-3
    only_z = gradients(lambda *given: head_loss(*given, z_loss=Z_LOSS), torch.float64)
    assert torch.equal(
        only_z[0], gradients(lambda *given: head_loss(*given, z_loss=1e-300), torch.float64)[0]
    )


def test_a_run_with_a_cap_and_a_z_loss_reports_the_cross_entropy() -> None:
    """Its evaluation is that of its logits; the z-loss changes weights and no loss of the first step."""
    config = small_config("2bw", steps=3)
    config = changed(config, {"model": replace(config.model, logit_softcap=0.05)})
    losses, ends = {}, {}
    for z_loss in (0.0, 0.5):
        config = changed(config, {"model": replace(config.model, z_loss=z_loss)})
        rows = replayed(config)
        ends[z_loss] = rows.result.weights
        losses[z_loss] = [row["train_loss"] for row in rows.of_kind("step")]
    assert losses[0.0][0] == losses[0.5][0]
    assert losses[0.0][-1] != losses[0.5][-1]
    # Every logit is within 0.05 of zero.
    assert abs(losses[0.5][0] - math.log(256)) <= 0.1
    module = whole_model(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(ends[0.5][name] * 20)
        logits = module(torch.arange(24).reshape(2, 12))
    assert 0.04 < logits.abs().max() <= 0.05


def test_planned_memory_of_a_loss_with_terms_is_that_of_one_chunk() -> None:
    config = small_config()
    assert head_chunk_rows(config) is None
    config = changed(config, {"model": replace(config.model, z_loss=1e-4)})
    assert head_chunk_rows(config) == config.train.microbatch_size * config.data.context
