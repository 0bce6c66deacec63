"""Memory by kind: what a run measures is what its programs and its configuration say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.small_runs import Rows, small_config, with_documents, with_experts
from torch.multiprocessing.reductions import StorageWeakRef

from optimizers import CORRECTIONS
from optimizers import NAMES as OPTIMIZERS
from optimizers.grouping import role_of
from schedules import NAMES as SCHEDULES
from schedules import analyze
from schedules.messages import Message
from stages.comm.p2p import InProcessLinks
from stages.config.run_config import CorrectionConfig, RunConfig
from stages.config.segments import segment_program
from stages.memory.estimate import (
    course_of,
    rank_activations,
    recomputed_bytes,
    sizes,
    stage_memory,
)
from stages.memory.in_flight import in_flight_counts
from stages.model.decoder import Stage
from stages.pipeline.build import representative_programs
from stages.shape.families import FAMILIES
from stages.shape.partition import cut_of, stage_cuts, stage_parameters
from stages.trainer import replay

OPTIONS: dict[str, dict[str, Any]] = {
    "interleaved-1f1b": {"chunks": 2},
    "looped-bfs": {"chunks": 2},
    "pipedream": {"clip": "stage"},
    "pipedream-unstashed": {"clip": "stage"},
    "paci": {"clip": "stage"},
    "paci-v": {"clip": "stage"},
}
KINDS = ("weights", "master", "optimizer", "correction", "activations", "recomputed")


TWO_STAGES_A_RANK = (
    "interleaved-1f1b",
    "looped-bfs",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipe-v",
    "2bw-v",
    "paci-v",
)


def config_of(schedule: str, **changed: Any) -> RunConfig:
    """A run whose stages have one block each, but one of them two; more micro-batches than ranks."""
    microbatches, layers = (6, 7) if schedule in TWO_STAGES_A_RANK else (4, 4)
    options = {"stages": 3, "microbatches": microbatches, "layers": layers, "steps": 3, "eval_interval": 9}
    config = small_config(schedule, **{**options, **OPTIONS.get(schedule, {}), **changed})
    config.site.device = "cpu"
    return config


def measured(config: RunConfig) -> dict[str, list[int]]:
    rows = Rows()
    replay(config, recorder=rows)
    memory: dict[str, list[int]] = rows.of_kind("segment")[-1]["memory"]
    return memory


def by_kind(config: RunConfig, gradient_buffers: list[int]) -> dict[str, list[int]]:
    course = course_of(representative_programs(config))
    stages = stage_memory(config, course, gradient_buffers=gradient_buffers)
    return {kind: [getattr(stage, kind) for stage in stages] for kind in (*KINDS, "gradients")}


def buffers_of(config: RunConfig, memory: dict[str, list[int]]) -> list[int]:
    numbers = [
        sum(parameter.size for parameter in stage_parameters(config.model, cut)) for cut in cut_of(config)
    ]
    sizes_and_bytes = zip(numbers, memory["gradients"], strict=True)
    return [gradients // (count * sizes(config).master) for count, gradients in sizes_and_bytes]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameters_are_those_of_the_module(family: str) -> None:
    config = config_of("1f1b")
    config.model.family, config.model.head_dim = family, 6
    for cut in cut_of(config) + stage_cuts([0.5, 1, 2.5]):
        module = Stage(config.model, cut, context=config.data.context)
        shapes = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
        described = stage_parameters(config.model, cut)
        assert [(parameter.name, parameter.shape) for parameter in described] == shapes
        for parameter in described:
            # A model of a user's own has no description: its roles follow from names and dimensions.
            assert parameter.role is role_of(parameter.name, len(parameter.shape))


@pytest.mark.parametrize(
    ("schedule", "recompute", "precision"),
    # The counts follow from the program, and a number's bytes from the precision.
    [(schedule, recompute, "bfloat16") for schedule in SCHEDULES for recompute in ("none", "full")]
    + [
        (f"{schedule} with head shards", "none", kind)
        for schedule in ("1f1b", "2bw", "2bw-v", "zb-v", "v-half")
        for kind in ("float32", "bfloat16")
    ]
    + [(schedule, "selective", "bfloat16") for schedule in ("1f1b", "zero-bubble", "2bw", "paci-v")]
    + [(name, "none", kind) for name in ("1f1b", "2bw", "paci-v") for kind in ("float32", "float64")],
)
def test_a_run_holds_the_versions_of_its_programs(schedule: str, precision: str, recompute: str) -> None:
    schedule, _, with_shards = schedule.partition(" ")
    config = config_of(schedule, precision=precision, recompute=recompute)
    if with_shards:
        config.parallel.shard_head, config.model.vocab_size = True, 259
    program = segment_program(config, first_step=0, steps=config.train.steps)
    analysis = analyze(program)
    memory = measured(config)
    assert memory["versions"] == list(analysis.versions)
    assert memory["in_flight"] == list(analysis.activations)
    assert memory["in_flight"] == [max(map(sum, counts)) for counts in in_flight_counts(program)]
    expected = by_kind(config, buffers_of(config, memory))
    assert {kind: memory[kind] for kind in expected} == expected
    assert memory["rank_activations"] == rank_activations(config, program)
    held = sum(sum(memory[kind]) for kind in expected)
    assert sum(memory["total"]) == held + sum(memory["messages"])
    assert memory["device_peak"] == memory["device_reserved"] == memory["device_retries"] == []


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_documents_keep_a_rotary_table_for_each_micro_batch(precision: str, recompute: str) -> None:
    """Also where a stage has a half of a block, or the head alone."""
    config = config_of("zero-bubble", precision=precision, recompute=recompute, cut=[3.5, 0.5, 0])
    config = with_documents(config)
    memory = measured(config)
    expected = by_kind(config, buffers_of(config, memory))
    assert {kind: memory[kind] for kind in expected} == expected


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_every_family_keeps_what_its_description_says(precision: str, recompute: str) -> None:
    """Those that have another block than a Llama's; with the split backward, both halves."""
    for family in FAMILIES.keys() - {"llama"}:
        config = config_of("zero-bubble", precision=precision, recompute=recompute)
        config.model.family, config.model.head_dim = family, 6
        memory = measured(config)
        expected = by_kind(config, buffers_of(config, memory))
        assert {kind: memory[kind] for kind in expected} == expected


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_experts_keep_what_their_description_says(precision: str, recompute: str) -> None:
    for changed in (
        {"shared_experts": 2, "dense_layers": 3},
        {"router_score": "softmax", "route_normalised": False},
    ):
        config = with_experts(config_of("zero-bubble", precision=precision, recompute=recompute), **changed)
        memory = measured(config)
        expected = by_kind(config, buffers_of(config, memory))
        assert {kind: memory[kind] for kind in expected} == expected


@pytest.mark.parametrize("schedule", ["2bw", "paci"])
def test_data_ranks_share_what_is_updated(schedule: str) -> None:
    config = config_of(schedule, data=2, optimizer="muon")
    memory = measured(config)
    expected = by_kind(config, buffers_of(config, memory))
    assert {kind: memory[kind] for kind in expected} == expected
    alone = measured(config_of(schedule, optimizer="muon"))
    assert memory["weights"] == alone["weights"]
    assert all(mine < all_of_it for mine, all_of_it in zip(memory["master"], alone["master"], strict=True))


def test_recomputation_keeps_a_blocks_input_alone() -> None:
    plain, selective, recomputed = (
        measured(config_of("2bw", recompute=recompute)) for recompute in ("none", "selective", "full")
    )
    assert plain["recomputed"] == [0, 0, 0]
    described = config_of("2bw", recompute="full")
    assert recomputed["recomputed"] == [recomputed_bytes(described, cut_of(described)[0])] * 3
    assert recomputed["activations"][0] < plain["activations"][0] / 8
    for kind in ("activations", "recomputed"):
        between = sorted([plain[kind][0], recomputed[kind][0]])
        assert between[0] < selective[kind][0] < between[1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_keep_what_their_formula_says(optimizer: str) -> None:
    config = config_of("2bw", optimizer=optimizer, steps=2)
    assert measured(config)["optimizer"] == by_kind(config, [2, 2, 2])["optimizer"]


@pytest.mark.parametrize(
    ("schedule", "correction", "form"),
    [
        ("2bw", "none", "look-ahead"),
        ("2bw", "none", "buffered"),
        ("2bw", "weight-prediction", "look-ahead"),
        ("2bw", "delay-compensation", "look-ahead"),
        ("paci", "lr-discount", "look-ahead"),
        ("paci", "discrepancy", "look-ahead"),
    ],
)
def test_corrections_keep_what_their_formula_says(schedule: str, correction: str, form: str) -> None:
    config = config_of(schedule, form=form, coefficient=float(correction == "none"), steps=5)
    config.correction = CorrectionConfig(name=correction)
    memory = measured(config)
    assert memory["correction"] == by_kind(config, buffers_of(config, memory))["correction"]
    assert any(memory["correction"]) == (form == "buffered" or correction == "discrepancy")


def test_what_error_feedback_keeps_is_planned_as_the_catalogue_declares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def planned(coefficient: float, form: str) -> list[float]:
        config = config_of("2bw", form=form, coefficient=coefficient)
        return by_kind(config, [2] * config.parallel.stages)["correction"]

    once = planned(1.0, "buffered")
    assert not any([*planned(0.0, "buffered"), *planned(1.0, "look-ahead")])
    method = replace(CORRECTIONS["error-feedback-buffered"], values_per_parameter=3)
    monkeypatch.setitem(CORRECTIONS, "error-feedback-buffered", method)
    assert planned(1.0, "buffered") == [3 * held for held in once]
    assert all(once)


def test_measuring_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment an update: the run is weighed after the first, and goes on."""
    ends = []
    for weighed in (True, False):
        rows = Rows()
        if not weighed:
            monkeypatch.setattr(
                "stages.memory.measure.MemoryMeter._measure_microbatch", lambda *args, **kwargs: (0, 0, 0)
            )
        replay(config_of("zero-bubble", eval_interval=1), recorder=rows)
        ends.append(rows.rows[-1]["weights_sha256"])
    assert ends[0] == ends[1]


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
