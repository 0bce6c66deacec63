"""Memory by kind: what a run measures is what its programs, its configuration and the planner say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from support.planned import COSTS, check_as_planned, planned
from support.small_runs import Rows, in_processes, replayed, small_config, trained_here, with_experts
from support.training_cases import named
from torch.multiprocessing.reductions import StorageWeakRef

from asyncpp_cli.planner.estimate import estimate
from optimizers import CORRECTIONS
from optimizers import NAMES as OPTIMIZERS
from optimizers.grouping import role_of
from schedules import FAMILY
from schedules.messages import Message
from stages.comm.p2p import InProcessLinks
from stages.config.run_config import CorrectionConfig, RunConfig, changed
from stages.memory.estimate import recomputed_bytes
from stages.model.decoder import Stage
from stages.shape.families import FAMILIES, describe
from stages.shape.partition import cut_of, stage_cuts, stage_parameters
from stages.trainer import replay


def config_of(schedule: str, **given: Any) -> RunConfig:
    """A run whose stages have one block each, but one of them two; more micro-batches than ranks."""
    several = FAMILY[schedule].stages_per_rank > 1 or "chunks" in FAMILY[schedule].options
    microbatches, layers = (6, 7) if several else (4, 4)
    options = {"stages": 3, "microbatches": microbatches, "layers": layers, "steps": 3, "eval_interval": 9}
    config = small_config(schedule, **options | given)
    head = {"model.head_dim": 6} if config.model.family == "qwen3" else {}
    return changed(config, {"site.device": "cpu"} | head)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameters_are_those_of_the_module(family: str) -> None:
    config = config_of("1f1b", family=family)
    config = changed(config, {"model.head_dim": 6})
    for cut in cut_of(config) + stage_cuts([0.5, 1, 2.5]):
        module = Stage(config.model, cut, context=config.data.context)
        shapes = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
        described = stage_parameters(config.model, cut)
        assert [(parameter.name, parameter.shape) for parameter in described] == shapes
        for parameter in described:
            # A model of a user's own has no description: its roles follow from names and dimensions.
            assert parameter.role is role_of(parameter.name, len(parameter.shape))


BOTH = ("float32", "bfloat16")
RECOMPUTE = ("none", "selective", "full")


def settings_of_runs() -> Iterator[dict[str, Any]]:
    """The counts follow from the program, and a number's bytes from the precision."""
    for schedule in FAMILY:
        yield {"schedule": schedule, "precision": "bfloat16"}
    for schedule in ("1f1b", "zero-bubble", "2bw", "paci-v"):
        for recompute in ("selective", "full"):
            yield {"schedule": schedule, "precision": "bfloat16", "recompute": recompute}
    for precision in ("float32", "float64"):
        yield from ({"schedule": name, "precision": precision} for name in ("1f1b", "2bw", "paci-v"))
    for schedule in ("1f1b", "2bw", "2bw-v", "zb-v", "v-half"):
        yield {"schedule": schedule, "precision": "bfloat16", "shard_head": True, "vocab_size": 259}
    for schedule, stages in (("2bw-v", 2), ("zb-v", 2), ("1f1b", 1)):
        yield {"schedule": schedule, "family": "tied", "stages": stages, "optimizer": "muon"}
    for precision in BOTH:
        for recompute in RECOMPUTE:
            split = {"schedule": "zero-bubble", "precision": precision, "recompute": recompute}
            # Also where a stage has a half of a block, or the head alone.
            yield split | {"documents": True, "cut": [3.5, 0.5, 0]}
            yield from (split | {"family": family} for family in (*FAMILIES.keys() - {"llama"}, "experts"))
    yield from ({"schedule": name, "data": 2, "optimizer": "muon"} for name in ("2bw", "paci"))
    yield from ({"schedule": "2bw", "optimizer": optimizer} for optimizer in OPTIMIZERS)
    yield {"schedule": "2bw", "coefficient": 1.0, "form": "buffered"}


@pytest.mark.parametrize("case", [*settings_of_runs()], ids=named)
def test_a_run_holds_what_is_planned(case: dict[str, Any]) -> None:
    rows = check_as_planned(config := config_of(**case))
    assert rows.memory["device_peak"] == rows.memory["device_reserved"] == rows.memory["device_retries"] == []
    of_stages = rows.of_kind("start")[0]["stage_parameters"]
    assert sum(of_stages) == describe(config.model).parameter_count


@pytest.mark.parametrize("precision", BOTH)
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(
    "mixture",
    [{"shared_experts": 2, "dense_layers": 3}, {"router_score": "softmax", "route_normalised": False}],
    ids=named,
)
def test_experts_keep_what_their_description_says(
    mixture: dict[str, Any], recompute: str, precision: str
) -> None:
    config = config_of("zero-bubble", precision=precision, recompute=recompute)
    check_as_planned(with_experts(config, **mixture))


@pytest.mark.parametrize(
    ("schedule", "correction"),
    [
        ("2bw", "weight-prediction"),
        ("2bw", "delay-compensation"),
        ("paci", "lr-discount"),
        ("paci", "discrepancy"),
    ],
)
def test_corrections_keep_what_their_formula_says(schedule: str, correction: str) -> None:
    config = config_of(schedule, steps=5)
    config = changed(config, {"correction": CorrectionConfig(name=correction)})
    assert any(check_as_planned(config).memory["correction"]) == (correction == "discrepancy")


def test_what_error_feedback_keeps_is_planned_as_the_catalogue_declares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_plan(coefficient: float, form: str) -> list[float]:
        plan = planned(config_of("2bw", form=form, coefficient=coefficient))
        return [stage.correction for stage in plan.stages]

    once = of_plan(1.0, "buffered")
    assert not any([*of_plan(0.0, "buffered"), *of_plan(1.0, "look-ahead")])
    method = replace(CORRECTIONS["error-feedback-buffered"], values_per_parameter=3)
    monkeypatch.setitem(CORRECTIONS, "error-feedback-buffered", method)
    assert of_plan(1.0, "buffered") == [3 * held for held in once]
    assert all(once)


def test_data_ranks_share_what_is_updated() -> None:
    shared, alone = (replayed(config_of("2bw", data=data, optimizer="muon")).memory for data in (2, 1))
    assert shared["weights"] == alone["weights"]
    assert all(mine < all_of_it for mine, all_of_it in zip(shared["master"], alone["master"], strict=True))


def test_recomputation_keeps_a_blocks_input_alone() -> None:
    plain, selective, recomputed = (
        replayed(config_of("2bw", recompute=recompute)).memory for recompute in RECOMPUTE
    )
    assert plain["recomputed"] == [0, 0, 0]
    described = config_of("2bw", recompute="full")
    assert recomputed["recomputed"] == [recomputed_bytes(described, cut_of(described)[0])] * 3
    assert recomputed["activations"][0] < plain["activations"][0] / 8
    for kind in ("activations", "recomputed"):
        between = sorted([plain[kind][0], recomputed[kind][0]])
        assert between[0] < selective[kind][0] < between[1]


def test_measuring_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment an update: the run is weighed after the first, and goes on."""
    config = config_of("zero-bubble", eval_interval=1)
    weighed = replayed(config).digest
    measure = "stages.memory.measure.MemoryMeter._measure_microbatch"
    monkeypatch.setattr(measure, lambda *args, **kwargs: (0, 0, 0))
    assert replayed(config).digest == weighed


def test_micro_batches_in_flight_keep_neither_input_nor_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 autograd needs neither on a CPU: an activation is held from its sending until the end of
    the receiver's forward. In float32 the receiver's first norm needs it until the backward."""
    send = InProcessLinks.send
    most = {}
    for precision in ("bfloat16", "float32"):
        sent: list[StorageWeakRef] = []
        alive = []

        def note(
            links: InProcessLinks,
            message: Message,
            tensor: torch.Tensor,
            sent: list[StorageWeakRef] = sent,
            alive: list[int] = alive,
        ) -> None:
            # The mail has those that no rank has come to.
            if message.destination > message.source:
                waiting = {of_mail.untyped_storage()._cdata for of_mail in links._mail.values()}
                alive.append(sum(not ref.expired() and ref.cdata not in waiting for ref in sent))
                sent.append(StorageWeakRef(tensor.untyped_storage()))
            send(links, message, tensor)

        monkeypatch.setattr(InProcessLinks, "send", note)
        replay(config_of("2bw", precision=precision), recorder=Rows())
        most[precision] = max(alive)
    # The one is the input of the stage that is sending.
    assert most["bfloat16"] == 1 < most["float32"]


def cases() -> list[RunConfig]:
    mixture = {"shared_experts": 1, "dense_layers": 1}
    many: list[dict[str, Any]] = [
        {"schedule": "1f1b", "recompute": "selective", "precision": "bfloat16"},
        {"schedule": "gpipe", "recompute": "full"},
        {"schedule": "zero-bubble", "optimizer": "muon"},
        {"schedule": "2bw", "precision": "bfloat16"},
        {"schedule": "2bw", "coefficient": 1.0, "form": "buffered", "recompute": "full", "ema_decay": 0.9},
        {"schedule": "pipedream", "optimizer": "soap"},
        {"schedule": "paci", "precision": "bfloat16", "recompute": "full"},
        {"schedule": "2bw-v", "layers": 6, "recompute": "selective"},
        {"schedule": "2bw", "cut": [1.5, 2.5], "recompute": "full"},
        {"schedule": "2bw-v", "split": True, "precision": "bfloat16"},
        {"schedule": "paci-v", "ahead": 2},
        {"schedule": "2bw", "shard_head": True},
        {"schedule": "1f1b", "shard_head": True, "tied": True},
        {"schedule": "2bw", "shard_head": True, "tied": True},
        {"schedule": "2bw-v", "shard_head": True, "precision": "bfloat16", "layers": 6},
    ]
    configs = [small_config(microbatches=6, steps=4, eval_interval=9, **one) for one in many]
    return configs + [with_experts(config, **mixture) for config in configs[2:5]]


@pytest.mark.slow
def test_memory_is_within_five_percent_of_what_processes_hold() -> None:
    configs = cases()
    by_rank = in_processes(trained_here, configs, size=2)
    for config, *of_ranks in zip(configs, *by_rank, strict=True):
        (memory,) = [rows.memory for rows in of_ranks if rows.rows]  # from the rank of the last stage
        plan = planned(config)
        lasting = [0, 0]
        for stage, (rank, of_stage) in enumerate(zip(plan.rank_of_stage, plan.stages, strict=True)):
            assert asdict(of_stage) == {kind: memory[kind][stage] for kind in asdict(of_stage)}
            lasting[rank] += of_stage.total
        for rank, of_rank in enumerate(plan.memory):
            assert of_rank["reduction"] == memory["reduction"][rank] == 0
            assert of_rank["activations"] <= memory["rank_activations"][rank]
            lasting[rank] += of_rank["messages"]
        assert lasting == pytest.approx(memory["total"], rel=0.05)


@pytest.mark.slow
def test_room_for_reductions_is_what_processes_hold() -> None:
    """A flush exchanges early, in smaller rounds, and `2bw` afterwards; both have the same buffers."""
    configs = [
        small_config(schedule, stages=1, data=2, precision=precision)
        for schedule, precision in (("1f1b", "float32"), ("2bw", "bfloat16"))
    ]
    writer, _ = in_processes(trained_here, configs, size=2)
    for config, rows in zip(configs, writer, strict=True):
        (of_stage,) = planned(config).memory
        assert [of_stage["reduction"]] == rows.memory["reduction"]
        assert of_stage["reduction"] > 0


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "options"),
    [
        ("2bw", 4, 2, {"delay": 2}),
        ("2bw", 3, 32, {"data": 2, "optimizer": "muon", "ema_decay": 0.9}),
        ("pipedream", 4, 12, {"update_interval": 3}),
        ("paci", 4, 8, {"data": 3}),
        ("looped-bfs", 2, 5, {}),
        ("v-min", 3, 12, {"layers": 6}),
        ("paci-v", 3, 12, {"layers": 6, "update_interval": 2}),
        ("2bw-v", 2, 12, {"ahead": 2}),
        ("2bw-v", 2, 3, {"split": True, "precision": "bfloat16", "ema_decay": 0.9}),
        ("dualpipe-v", 2, 9, {"precision": "bfloat16"}),
        ("2bw", 4, 20, {"shard_head": True, "precision": "bfloat16", "recompute": "full"}),
        ("2bw-v", 3, 16, {"shard_head": True, "layers": 8, "data": 2}),
        ("2bw-v", 2, 8, {"shard_head": True, "split": True, "precision": "bfloat16"}),
        ("zb-v", 3, 12, {"layers": 6, "shard_head": True, "tied": True, "data": 2}),
        ("2bw", 4, 4, {"shard_head": True, "tied": True}),
        ("v-half", 2, 9, {"shard_head": True}),
    ],
)
@pytest.mark.slow
def test_memory_of_deeper_and_wider_layouts(
    schedule: str, stages: int, microbatches: int, options: dict[str, Any]
) -> None:
    """Though the planner looks at a short program in place of the run's own."""
    given: dict[str, Any] = {"layers": 4, "steps": 4, "eval_interval": 9} | options
    check_as_planned(small_config(schedule, stages=stages, microbatches=microbatches, **given))


@pytest.mark.parametrize("family", ["llama", "experts"])
@pytest.mark.parametrize(
    ("schedule", "cut", "options"),
    [
        ("2bw", [1.5, 1, 1.5], {"precision": "bfloat16", "data": 2}),
        ("1f1b", [2.5, 1.5, 0], {"recompute": "full"}),
        ("zero-bubble", [0.5, 1, 2.5], {"recompute": "selective"}),
        ("2bw-v", [1.5, 1, 1, 0.5], {"split": True, "recompute": "full"}),
        ("interleaved-1f1b", [0.5, 1.5, 0.5, 1.5], {"recompute": "selective"}),
    ],
)
@pytest.mark.slow
def test_memory_of_stages_that_begin_and_end_within_a_block(
    schedule: str, cut: list[float], options: dict[str, Any], family: str
) -> None:
    given: dict[str, Any] = {"stages": 3 if len(cut) == 3 else 2, "layers": 4, "eval_interval": 9} | options
    check_as_planned(
        small_config(schedule, cut=cut, microbatches=2 * given["stages"], family=family, **given)
    )


@pytest.mark.parametrize("schedule", ["2bw", "2bw-v"])
def test_a_gpu_has_a_second_gradient_buffer_where_backwards_overtake_the_verdict(schedule: str) -> None:
    config = small_config(schedule, stages=1, microbatches=4, eval_interval=9)
    on_cpu = planned(config)
    config = changed(config, {"site.device": "cuda"})
    on_gpu = estimate(config, COSTS, limit_gb=None)
    assert [kinds["gradients"] for kinds in on_gpu.memory] == [
        2 * kinds["gradients"] for kinds in on_cpu.memory
    ]
