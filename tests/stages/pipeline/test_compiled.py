"""Compiled blocks compute what plain ones do: in every schedule, with whole backwards and split ones."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.single_process import batches
from support.small_runs import (
    FAILS_COMPILED_IN_FLOAT64,
    Operators,
    Rows,
    compiles_float64,
    ranks_of,
    replayed,
    small_config,
    with_documents,
    with_experts,
)
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.runtime import cache_dir_utils
from torch.utils._python_dispatch import _disable_current_modes

from schedules import FAMILY
from stages.config.run_config import ModelConfig, RunConfig, changed
from stages.model import runner
from stages.model.compiler import compile_refusal, compiles_here, is_compiled, missing_for_compile
from stages.model.decoder import initialise, make_block, rotary_table
from stages.model.gradients.split_backward import DeferredGradients, deferring
from stages.model.runner import block_runner
from stages.pipeline.stage_pass import run_stage
from stages.resolve.checks import check
from stages.trainer import replay

# torch's own use of what it has deprecated, met when the compiler is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Kernels without vector instructions compile in a third of the time."""
    torch.compiler.reset()  # what earlier files compiled counts towards its limit of recompilations
    with pytest.MonkeyPatch.context() as patch, inductor.patch({"cpp.vec_isa_ok": False}):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


def run_of(schedule: str, *, compile: bool | None = None, **more: Any) -> RunConfig:
    facts = FAMILY[schedule]
    config = small_config(
        schedule,
        stages=2,
        microbatches=8 if schedule == "dualpipe-v" else 4,
        layers=4,
        steps=2,
        precision="float64",
        split="split" in facts.options,
        **more,
    )
    config = changed(config, {"train.compile": compile})
    config = changed(config, {"train.recompute": "none" if compile_refusal(config) is None else "full"})
    check(config)
    return config


@compiles_float64
@pytest.mark.parametrize(
    ("schedule", "cut"),
    [*((name, None) for name in ("2bw", "2bw-v", "paci")), ("zero-bubble", [1.5, 2.5])],
)
@pytest.mark.slow
def test_schedules_train_compiled_as_they_do_plain(schedule: str, cut: list[float] | None) -> None:
    """Whole backwards and split ones, with one compilation of each form, such as half a block: the kernels
    are found again."""
    plain, compiled = (
        replay(run_of(schedule, compile=compile, cut=cut), recorder=Rows()) for compile in (False, True)
    )
    assert compiled.train_losses == pytest.approx(plain.train_losses, rel=1e-12)
    for name, weight in plain.weights.items():
        torch.testing.assert_close(compiled.weights[name], weight, rtol=1e-9, atol=1e-9)


@compiles_float64
@pytest.mark.slow
def test_documents_of_any_number_need_no_other_compilation() -> None:
    """One for whole backwards, and one for split ones."""
    config = run_of("zero-bubble", compile=True)
    config = changed(config, {"train.recompute": "selective"})
    config = with_documents(config)
    plain = replay(replace(config, train=replace(config.train, compile=False)), recorder=Rows())
    torch.compiler.reset()
    counters.clear()
    compiled = replay(config, recorder=Rows())
    assert compiled.train_losses == pytest.approx(plain.train_losses, rel=1e-12)
    for name, weight in plain.weights.items():
        torch.testing.assert_close(compiled.weights[name], weight, rtol=1e-9, atol=1e-9)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.slow
def test_a_compiled_first_half_leaves_the_matrices_to_the_second(experts: bool) -> None:
    """Those of linear layers; stacks of experts belong to the first half there."""
    model = run_of("zero-bubble").model
    if experts:
        model = with_experts(run_of("zero-bubble"), expert_width=16, shared_experts=1).model
    dtype, tolerance = (torch.float32, 1e-4) if FAILS_COMPILED_IN_FLOAT64 else (torch.float64, 1e-10)
    block = make_block(model, experts=experts).to(dtype)
    for name, parameter in block.named_parameters():
        initialise(parameter, name=name, seed=0, model=ModelConfig(layers=2))
    matrices = [name for name in block.state_dict() if "norm" not in name and "experts" not in name]
    x = torch.randn(3, 12, model.width, dtype=dtype, generator=torch.Generator().manual_seed(0))
    given = [rotary_table(model, context=12).to(dtype), *([torch.zeros(model.experts)] if experts else [])]

    def gradients(*, recompute: str, compiled: bool, split: bool) -> dict[str, torch.Tensor]:
        run = block_runner(model, recompute=recompute, compiled=compiled)
        start = x.clone().requires_grad_()
        for parameter in block.parameters():
            parameter.grad = torch.zeros_like(parameter)
        deferred = DeferredGradients() if split else None
        with deferring(deferred):
            out = run(block, start, *given)
        out = out[0] if experts else out
        (out.sum() + (out**2).sum()).backward()
        if deferred is not None:
            assert {name for name, p in block.named_parameters() if not p.grad.any()} == set(matrices)
            deferred.compute()
        assert start.grad is not None
        return {
            "x": start.grad,
            **{name: p.grad for name, p in block.named_parameters() if p.grad is not None},
        }

    expected = gradients(recompute="none", compiled=False, split=False)
    measured = gradients(recompute="selective", compiled=True, split=True)
    for name, gradient in expected.items():
        assert gradient.any(), name
        torch.testing.assert_close(measured[name], gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_matrices_of_a_compiled_block_in_bfloat16_gather_what_plain_ones_do() -> None:
    """To a rounding of activations, and without one of the gradient: halves add the bits of the whole."""
    config = run_of("2bw")
    config = changed(config, {"train.precision": "bfloat16"})
    gathered = []
    for compiled, split in ((False, False), (True, False), (True, True)):
        (rank, *_) = ranks_of(config)
        weights = rank.stages[0].weights
        module = weights.newest().module
        module.run_block = block_runner(config.model, recompute="selective", compiled=compiled)
        deferred = DeferredGradients() if split else None
        with deferring(deferred):
            out = module(torch.arange(24).view(2, 12) % 7)
        (out**2).sum().backward()
        if deferred is not None:
            deferred.compute()
        gathered.append(dict(zip(weights.names, weights.gradient_buffer.views, strict=True)))
    plain, whole, split_in_halves = gathered
    for name, gradient in whole.items():
        assert torch.equal(gradient, split_in_halves[name]), name
        torch.testing.assert_close(gradient, plain[name], rtol=0, atol=0.05 * float(plain[name].abs().max()))
        if gradient.ndim > 1:
            assert not torch.equal(gradient, gradient.bfloat16().float()), name


@pytest.mark.parametrize("schedule", FAMILY)
def test_blocks_are_compiled_by_default_on_a_gpu_where_they_can_be(schedule: str) -> None:
    config = run_of(schedule)
    assert (is_compiled(config, device="cuda"), is_compiled(config, device="cpu")) == (True, False)
    plain = replace(config, train=replace(config.train, recompute="none"))
    assert is_compiled(plain, device="cuda") == (config.train.recompute == "none")
    for wanted in (False, True):
        asked = replace(config, train=replace(config.train, compile=wanted))
        assert [is_compiled(asked, device=device) for device in ("cpu", "cuda")] == [wanted, wanted]


def test_without_the_tools_blocks_are_compiled_only_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    config = run_of("2bw")
    assert is_compiled(config, device="cuda")
    assert not compiles_here(config, device="cuda")
    config = changed(config, {"train.compile": True})
    with pytest.raises(RuntimeError, match=r"train.compile is true, but no compiler .*no-such-compiler"):
        compiles_here(config, device="cuda")


def test_a_model_of_ones_own_is_not_compiled() -> None:
    config = run_of("2bw")
    own = replace(config, model=replace(config.model, factory="mine:make"))
    assert not is_compiled(own, device="cuda")


def test_the_start_says_whether_blocks_are_compiled() -> None:
    rows = replayed(run_of("2bw"))
    [start] = rows.of_kind("start")
    assert (start["compiled"], start["warm_up_seconds"]) == (False, 0.0)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    missing = missing_for_compile(device="cpu")
    assert missing is not None
    assert f"{tmp_path}/file/cache (" in missing
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new"))
    assert missing_for_compile(device="cpu") is None
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 10002")

    monkeypatch.setattr("getpass.getuser", nameless)
    missing = missing_for_compile(device="cpu")
    assert missing is not None
    assert "TORCHINDUCTOR_CACHE_DIR" in missing


def writable(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o775)


def linked(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to("elsewhere")


def in_a_folder_of_all(folder: Path) -> None:
    folder.mkdir()
    folder.parent.chmod(0o777)


def of_another_user(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    try:
        os.chown(folder, 54321, 54321)
    except PermissionError:
        pytest.skip("not root")


@pytest.mark.parametrize("make", [writable, linked, in_a_folder_of_all, of_another_user])
def test_a_cache_that_others_may_write_is_left(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made it could have any of its code run: torch loads what it finds there."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "restored at the end")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("ASYNCPP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    usual = Path(cache_dir_utils.default_cache_dir())
    assert missing_for_compile(device="cpu") is None
    assert (cache_dir_utils.cache_dir(), usual.stat().st_mode & 0o777) == (str(usual), 0o700)
    usual.rmdir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    make(usual)
    assert missing_for_compile(device="cpu") is None
    assert cache_dir_utils.cache_dir() == str(tmp_path / "cache" / "torchinductor")
    assert (tmp_path / "cache" / "torchinductor").stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "cache" / "torchinductor").chmod(0o777)
    missing = missing_for_compile(device="cpu")
    assert missing is not None
    assert f"others may write to {tmp_path}/cache/torchinductor" in missing


class OfMatrices(Operators):
    """Counts, by kind, what operators make or write in the shape of a matrix, its transpose or a stack,
    zeros of any shape, the loss's own gradient apart, and what routes: choices, sorts, gathers of rows."""

    VIEWS = ("aten.t.", "view", "detach", "transpose", "unbind", "select", "alias", "slice", "as_strided")
    PRODUCTS = ("aten.mm.", "aten.addmm", "stack_gradient")
    ROUTING = ("topk", "sort", "order_rows", "cumsum", "index_put")

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        shapes = {tuple(parameter.shape) for parameter in module.parameters() if parameter.ndim > 1}
        shapes |= {shape[1:] for shape in shapes if len(shape) == 3}
        self.shapes = shapes | {shape[::-1] for shape in shapes if len(shape) == 2}
        self.made: Counter[str] = Counter()

    def note(self, operator: Any, given: tuple[Any, ...], out: Any) -> None:
        name = str(operator)
        if any(word in name for word in self.ROUTING):
            self.made[name.split(".")[1]] += 1
        elif name == "aten.index.Tensor" and out.ndim == 2:
            self.made["gather"] += 1
        elif (
            isinstance(out, Tensor)
            and out.is_floating_point()
            and not any(view in name for view in self.VIEWS)
        ):
            if tuple(out.shape) in self.shapes:
                product = any(product in name for product in self.PRODUCTS)
                self.made["product" if product else name.split(".")[1]] += 1
            elif "zero" in name or "fill" in name:
                self.made[name] += 1


def budget(kind: str, *, recompute: str, compiled: bool, split: bool) -> dict[str, int]:
    """What the backward of a block in bfloat16 makes in the shape of a matrix, its weight half included; with
    the embedding, to whose sum rows are added, or the head.

    A matrix: its product, which adds. The router's, in float32: its product, which is added, and where it is
    not compiled its weights, widened, in each run of the forward too. A stack: a product that is added to the
    sum as it is, in one kernel; on a CPU that does not compile, a product that adds for each expert.

    Rows are gathered of the output's gradient, of the input, and of the input's gradient: the first again in
    a weight half, all else once. Compiled, gathers are part of other kernels. Only a forward that runs again
    chooses experts and sorts.
    """
    if kind != "mixture":
        ends: dict[str, dict[str, int]] = {
            "embedding": {"product": 7, "index_add_": 1},
            "head": {"product": 8},
        }
        return ends.get(kind, {"product": 7})
    if compiled:
        return {"product": 7 + 1 + 3, "add_": 1 + 3}
    of_choice = {"aten.new_zeros.default": 1}  # of the scores, `(tokens, experts)`
    made = Counter(
        {"product": 7 + 1 + 3 * 6, "add_": 1, "_to_copy": 1, "gather": 4 if split else 3} | of_choice
    )
    return made + Counter(
        {"_to_copy": 1, "gather": 2, "topk": 1, "order_rows": 1} if recompute == "full" else {}
    )


@pytest.mark.parametrize(
    ("kind", "compiled", "recompute", "split"),
    [
        *itertools.product(
            ("dense", "documents", "mixture", "embedding", "head"),
            [False],
            ("none", "selective", "full"),
            [False, True],
        ),
        # A block of a mixture has the matrices of a dense one, too.
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(["mixture"], [True], ("none", "full"), [False, True])
        ),
    ],
)
def test_a_backward_makes_nothing_as_large_as_a_matrix_but_its_product_and_routes_once(
    kind: str, split: bool, recompute: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """11 % of a 7b stage's time on a GPU were zeros of that size, which were made, widened and added. A
    mixture sorted its rows once more in each backward, and three times in a weight half."""
    if compiled:
        compile_block = runner._compile

        def outside(*given: Any, **kind: bool) -> Any:
            """The compiler does not run under a dispatch mode; recomputation calls it in a backward."""
            function = compile_block(*given, **kind)

            def call(*given: Any) -> Any:
                with _disable_current_modes():
                    return function(*given)

            return call

        monkeypatch.setattr(runner, "_compile", outside)
    config = small_config(
        "zero-bubble" if split else "2bw",
        stages=3,
        layers=3,
        precision="bfloat16",
        recompute=recompute,
        compile=compiled,
    )
    if kind == "mixture":
        config = with_experts(config, shared_experts=1)
    number = {"embedding": 0, "head": 2}.get(kind, 1)
    state = ranks_of(config)[number].stages[number]
    replica, documents = state.weights.newest(), None
    if kind == "documents":
        config = with_documents(config)
        documents = batches(config).documents(0)
    # Neither the tokens nor the rows of the experts are as many as a matrix has rows or columns.
    shape = (3, 12, 16) if documents else (1, 7, 16)
    # Drawn alike in every session: an expert without a token would have no product.
    given, gradient = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.arange(shape[1])[None]
    for counting in (False, True):  # the first backward is compiled
        _, done = run_stage(
            replica.module,
            tokens if kind == "embedding" else given,
            targets=tokens if kind == "head" else None,
            loss_share=1,
            split=split,
            documents=documents,
            routing=replica.routing(),
        )
        with OfMatrices(replica.module) if counting else nullcontext() as counted:
            done.backward(None if kind == "head" else gradient)
            if split:
                done.weight_half()
    assert counted is not None
    assert counted.made == budget(kind, recompute=recompute, compiled=compiled, split=split)
