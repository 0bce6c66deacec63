"""The planner: its list, what it says of memory and time, and what it refuses."""

from __future__ import annotations

import csv
import json
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import asyncpp, refusal, succeeded
from support.planned import COSTS, layout_of

from asyncpp_cli.experiment.matrix import expand
from asyncpp_cli.experiment.template import load
from asyncpp_cli.planner.balance import efficiency
from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.cells import estimate_key
from asyncpp_cli.planner.costs.devices import CONTEXT_GB, DEVICES
from asyncpp_cli.planner.costs.roofline import ModelTimes, PartTimes, Roofline
from asyncpp_cli.planner.cuts import WORTH_A_CUT, cuts_to_try
from asyncpp_cli.planner.estimate import (
    Estimate,
    best_of,
    estimate,
    least_with,
    own_estimate,
)
from asyncpp_cli.planner.layouts import CONSIDERED, RECOMPUTE, layouts
from asyncpp_cli.planner.memory import OF_THE_DEVICE, RankMemory
from asyncpp_cli.planner.rank import best_first, least_delay, least_in_pace, least_seconds
from asyncpp_cli.planner.shared import Found, Shared
from asyncpp_cli.runs.settings import with_settings
from schedules import ScheduleError, find, is_synchronous
from stages.config.run_config import RunConfig, changed, tokens_per_step
from stages.config.segments import segment_program
from stages.memory.estimate import course_of, sizes, stage_memory
from stages.resolve.checks import check
from stages.resolve.schedule import resolve_schedule
from stages.shape.families import describe
from stages.shape.partition import stage_cuts
from stages.shape.spec import PartSpec

FIELDS = [
    *("schedule", "stages", "data_parallel", "microbatches", "microbatch_size", "recompute", "fits"),
    *("memory_gb", "step_time", "tokens_per_second", "bubble", "delay"),
]


def planned(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(succeeded("plan", *arguments, "--json").output)
    return found


NAMES = ("1f1b", "interleaved-1f1b", "2bw", "2bw-v", "paci")


@pytest.mark.slow
def test_the_largest_model_has_asynchronous_layouts_that_fit() -> None:
    chosen = [word for name in NAMES for word in ("--schedule", name)]
    ten_billion = planned("10b", "--gpus", "8", "--tokens-per-step", "65536", "--memory", "80", *chosen)
    assert list(ten_billion[0])[: len(FIELDS)] == FIELDS
    fitting = [one for one in ten_billion if one["fits"]]
    assert {one["schedule"] for one in fitting if not is_synchronous(one["schedule"])} >= {"2bw", "paci"}
    assert {one["delay"] for one in fitting if one["schedule"] == "2bw"} >= {1}
    assert {one["chunks"] for one in fitting if one["schedule"] == "interleaved-1f1b"} == {2, 4}
    for one in ten_billion:
        assert one["stages"] * one["data_parallel"] == 8
        tokens = one["data_parallel"] * one["microbatches"] * one["microbatch_size"] * 4096
        assert tokens == 2**16
        assert one["tokens_per_second"] == pytest.approx(tokens / one["step_time"])
        assert one["fits"] == (one["memory_gb"] <= 80)
        assert sum(one["cut"]) == 44
        assert 0 <= one["bubble"] < 1
        held = [sum(of_rank.values()) / 1e9 for of_rank in one["memory"]]
        assert len(held) == one["stages"]
        assert one["memory_gb"] == pytest.approx(max(held), abs=1e-3)
    of_v = [one for one in ten_billion if one["schedule"] == "2bw-v"]
    options = {(one["split"], one["ahead"], one["recompute"]) for one in of_v}
    assert options == {(s, a, r) for s in (False, True) for a in (1, 2) for r in RECOMPUTE}
    assert {(one["stages"], len(one["cut"])) for one in of_v} == {(p, 2 * p) for p in (2, 4, 8)}
    for one in of_v:
        ranks = [*range(one["stages"])]
        assert one["rank_of_stage"] == [*ranks, *reversed(ranks), *ranks * one["shard_head"]]
    shown = succeeded("plan", "3b", "--gpus", "4", "--schedule", "2bw-v", "--rows", "40")
    assert "2bw-v, split, ahead 2, head in shards" in shown.output


@pytest.mark.parametrize(
    ("model", "changed", "gpus", "tokens", "limit"),
    [
        ("135m", [], 4, 2**14, 4.0),
        ("135m", [], 2, 2**13, 75.0),
        ("135m", ["model.tied=true"], 2, 2**13, 75.0),
    ],
)
@pytest.mark.slow
def test_the_first_layouts_are_those_of_all_sorted(
    monkeypatch: pytest.MonkeyPatch, model: str, changed: list[str], gpus: int, tokens: int, limit: float
) -> None:
    base = base_of(model, changed).config
    shared = Shared(COSTS)
    every: list[Estimate] = []
    for config in layouts(base, gpus=gpus, tokens_per_step=tokens):
        with suppress(ScheduleError):
            memory = RankMemory(config, shared)
            possible = not (base.model.tied and not memory.program.is_tieable)
            if possible and not memory.needs_too_many_queues:
                cuts = cuts_to_try(config, shared, limit_gb=limit)
                found = best_of(cuts, config, shared) if cuts else own_estimate(config, shared)
                every.append(found)
                assert least_delay(config) <= found.delay
                assert (1 - 1e-9) * least_seconds(config, shared) <= found.step.seconds
                times = shared.times(config, found.cut)
                for bound in (least_with, least_in_pace):
                    assert (1 - 1e-9) * bound(config, shared, times) <= found.step.seconds
                assert (1 - 1e-9) * memory.program.least_seconds(times) <= found.step.seconds
    every.sort(key=lambda one: (one.memory_gb > limit, one.step.seconds, one.delay, one.memory_gb))
    estimated = 0

    def counted(*arguments: Any, **options: Any) -> Estimate:
        nonlocal estimated
        estimated += 1
        return best_of(*arguments, **options)

    monkeypatch.setattr("asyncpp_cli.planner.rank.best_of", counted)
    asked = {"gpus": gpus, "tokens_per_step": tokens, "names": CONSIDERED, "limit_gb": limit}
    in_order = best_first(base, Shared(COSTS), **asked)
    first = list(islice(in_order, 20))
    assert first == every[:20]
    assert estimated < len(every)
    assert first + list(in_order) == every


@pytest.mark.slow
def test_every_layout_is_a_run_that_could_be_trained() -> None:
    base = base_of("360m", ["optimizer=muon"])
    asked = {"gpus": 4, "tokens_per_step": 2**13, "names": NAMES, "limit_gb": 75.0}
    found = list(best_first(base.config, Shared(COSTS), **asked))
    assert len(found) > 20
    for one in found:
        config = changed(one.config, {"model.vocab_size": 50304})  # at least that of any data
        check(config)
        assert tokens_per_step(config) == 2**13
        check(changed(config, {"parallel.cut": tuple(one.cut)}))


def test_many_microbatches_hold_no_more_at_once_than_the_program_that_stands_for_them() -> None:
    config = layout_of("360m", "interleaved-1f1b", microbatches=24, chunks=2)
    program = segment_program(config, first_step=0, steps=1)
    whole = stage_memory(config, course_of([program]), gradient_buffers=[1] * 8)
    assert whole == estimate(config, COSTS, limit_gb=None).stages


def test_a_cut_that_fits_is_found_where_the_even_one_does_not() -> None:
    """1F1B keeps the most activations at the first stage, so that one is given fewer blocks."""
    config = layout_of("3b", "1f1b", data=2, microbatches=64, size=2)
    even = estimate(config, COSTS, limit_gb=None)
    limit = even.memory_gb * 0.93
    fitting = estimate(config, COSTS, limit_gb=limit)
    assert even.memory_gb > limit >= fitting.memory_gb
    assert fitting.cut[0] < even.cut[0]
    assert sum(fitting.cut) == sum(even.cut)
    config = changed(config, {"parallel.cut": tuple(even.cut)})
    assert estimate(config, COSTS, limit_gb=limit).cut == even.cut


def test_a_cut_that_fits_is_found_of_a_v_whose_ranks_hold_two_stages() -> None:
    config = layout_of("3b", "2bw-v", data=2, microbatches=64, size=2)
    even = estimate(config, COSTS, limit_gb=None)
    limit = even.memory_gb * 0.95
    assert max(estimate(config, COSTS, limit_gb=limit).rank_gb) <= limit


class MultiplyAdds:
    """Costs by arithmetic alone: a multiply-add takes a picosecond, and backwards take twice the forward."""

    source, threads = "multiply-adds", None

    def parts(self, config: RunConfig) -> ModelTimes:
        tokens = config.train.microbatch_size * config.data.context

        def times(part: PartSpec) -> PartTimes:
            once = tokens * part.forward_multiply_adds(context=config.data.context) * 1e-12
            return PartTimes(forward=once, backward=2 * once, input_half=once, weight_half=once, cheap=0.0)

        spec = describe(config.model)
        return ModelTimes(
            embedding=times(spec.embedding),
            blocks=tuple(map(times, spec.blocks)),
            halves=tuple(map(times, spec.halves)),
            head=times(spec.head),
        )

    def nothing(self, config: RunConfig, *_: object) -> float:
        return 0.0

    update = reduction = beside_reduction = message = nothing


@pytest.mark.parametrize(
    ("model", "whole", "within"),
    [
        ("10b", [0.946, 0.935, 0.935], [0.966, 0.935, 0.935]),
        ("7b", [0.927, 0.846, 0.719], [0.954, 0.891, 0.788]),
        ("10b-moe", [0.906, 0.793, 0.671], [0.951, 0.864, 0.793]),
        ("2b-moe", [0.938, 0.741, 0.371], [0.947, 0.852, 0.522]),
        ("360m", [0.984, 0.886, 0.5], [0.984, 0.976, 0.646]),
    ],
)
def test_ranks_compute_as_much_of_the_time_as_the_balance_says(
    model: str, whole: list[float], within: list[float]
) -> None:
    """A schedule that never flushes waits for nothing but the stage with most work."""
    found = json.loads(succeeded("plan", model, "data.context=4096", "--balance", "--json").output)
    assert [round(each["whole"], 3) for each in found] == whole
    assert [round(each["within"], 3) for each in found] == within
    untied = ("data.context=4096", "model.tied=false")
    for each in found:
        config = layout_of(model, "2bw", *untied, stages=each["stages"], microbatches=64)
        chosen = estimate(config, MultiplyAdds(), limit_gb=inf)
        config = changed(config, {"parallel.cut": tuple(each["cut"])})
        asked = estimate(config, MultiplyAdds(), limit_gb=inf)
        is_worth_it = each["within"] * (1 - WORTH_A_CUT) >= each["whole"]
        for found_cut, share in (
            (chosen, each["within" if is_worth_it else "whole"]),
            (asked, each["within"]),
        ):
            assert efficiency(config, stage_cuts(found_cut.cut)) == pytest.approx(share, rel=1e-12)
            # The step is played from an empty pipeline, whose faster stages still catch up.
            assert 1 - found_cut.step.bubble == pytest.approx(share, rel=1e-5)


@pytest.mark.parametrize("schedule", ["2bw", "2bw-v"])
def test_a_cut_within_blocks_is_chosen_by_the_memory_that_is_planned_for_it(schedule: str) -> None:
    within = 0
    for recompute in RECOMPUTE:
        config = layout_of("1b-7b-moe", schedule, data=8, recompute=recompute)
        even = estimate(config, COSTS, limit_gb=None)
        for share in (0.9, 1, 1.1):
            limit = share * even.memory_gb
            for cut in cuts_to_try(config, Shared(COSTS), limit_gb=limit):
                asked = changed(config, {"parallel.cut": tuple(cut)})
                resolve_schedule(asked)
                assert estimate(asked, COSTS, limit_gb=None).memory_gb <= limit
                within += cut != list(map(int, cut))
    assert within


def test_a_mixture_moves_the_bytes_of_its_passes_over_rows_and_stacks() -> None:
    """The experts of a block on a device that computes at no cost: a megabyte a second, 2 bytes a value."""
    slow = replace(COSTS.device, tflops={"bfloat16": inf, "float32": inf}, bandwidth_gbs=1e-3)
    changes = ["data.context=64", "train.precision=bfloat16", "train.microbatch_size=1"]
    config = base_of("nano-moe", changes).config
    experts, tokens, k = describe(config.model).halves[1], 64, 4
    times = Roofline(slow).parts(config).halves[1]
    assert (config.model.width, config.model.expert_width, config.model.active_experts) == (128, 96, k)
    kept = 2 * tokens * sizes(config).of(experts.kept)  # written, read again
    wide, narrow, stacks = 2 * tokens * k * 128, 2 * tokens * k * 96, 2 * 3 * 16 * 128 * 96
    gather = wide
    two_products, gates, product, total = 2 * (wide + narrow), 3 * narrow, narrow + wide, wide
    forward = gather + two_products + gates + product + total
    # The products with gate and up, which are kept, are written, and read again.
    assert times.forward == pytest.approx((kept + forward - 4 * narrow + stacks) / 1e6)
    product, gates, two_products, total = wide + narrow, 6 * narrow, 2 * (narrow + wide), 2 * wide
    backward = gather + product + gates + two_products + total
    assert times.input_half == pytest.approx((1.5 * kept + backward - 6 * narrow + stacks) / 1e6)
    # The sum is read and written in float32.
    gradients = wide + 2 * (wide + narrow) + (wide + narrow) + 2 * stacks + 2 * (2 * stacks)
    assert times.weight_half == pytest.approx(gradients / 1e6)


@pytest.mark.parametrize("dense_layers", [0, 1])
def test_a_mixture_takes_the_memory_of_all_and_the_time_of_the_active(dense_layers: int) -> None:
    changes = (f"model.dense_layers={dense_layers}", "model.mlp_width=10944")
    config = layout_of("10b-moe", "1f1b", *changes, data=16)
    even = estimate(config, COSTS, limit_gb=None)
    spec = describe(config.model)
    biases = (24 - dense_layers) * 64
    assert sum(of_stage["weights"] for of_stage in even.memory) == 2 * spec.parameter_count + 4 * biases
    assert spec.parameter_count > 5 * spec.active_count
    # More than the active arithmetic at the peak, and less than three times all of it.
    tokens = tokens_per_step(config) / 64
    flops = spec.training_flops(context=config.data.context)
    seconds = tokens * flops / 989.4e12
    assert seconds < even.step.seconds < 3 * seconds * spec.parameter_count / spec.active_count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "change", "said"),
    [
        ("nano", "model.heads=0", "model.heads: is 0, must be at least 1"),
        ("nano", "model.vocab_size=0", "model.vocab_size: is 0, must be at least 1"),
        ("nano", "model.layers=1000000000", "model.layers: is 1,000,000,000, must be at most 10,000"),
        ("nano", "model.kv_heads=5", "model.kv_heads: is 5, must divide model.heads = 4"),
        ("nano", "model.family=x", "model.family: 'x' is not known; accepted: llama, qwen3"),
        ("nano", "model.experts=3", "model.active_experts: is null, must be from 1 to model.experts = 3"),
        ("nano", "train.precision=x", "train.precision: 'x' is not known; accepted: float32"),
        ("quickstart", "data.context=0", "data.context: is 0, must be at least 1"),
    ],
)
def test_what_a_run_does_not_accept_is_not_planned(what: str, change: str, said: str) -> None:
    assert said in refusal("plan", what, change)


def test_a_template_is_planned_with_its_own_tokens(tmp_path: Path) -> None:
    found = planned("quickstart", "--gpus", "2", "--memory", "2")
    tokens = {one["data_parallel"] * one["microbatches"] * one["microbatch_size"] * 128 for one in found}
    assert tokens == {2048}
    assert all(one["fits"] for one in found)
    words = ("quickstart", "--gpus", "2", "--memory", "2", "--device", "a100")
    assert {one["times_of"] for one in planned(*words)} == {"a100 (data sheet)"}
    table = " ".join(succeeded("plan", *words, "--rows", "3").output.split())
    for said in ("on 2 GPUs, times of a100 (data sheet)", "the best 3 pipelines", "per rank (limit 2.0 GB"):
        assert said in table


@pytest.mark.slow
def test_the_best_synchronous_layout_is_shown_and_any_row_becomes_a_template(tmp_path: Path) -> None:
    file = tmp_path / "chosen.yaml"
    asked = ("plan", "360m", "optimizer=muon", "--gpus", "8", "--rows", "2")
    words = (*asked, "--as-template", file, "--row")
    said = succeeded(*words, "3")
    rows = [line.split() for line in said.output.splitlines() if " x " in line and "none" in line]
    assert "the best 2 pipelines and the best by delay and FSDP" in " ".join(said.output.split())
    assert (rows[2][0], rows[3][0]) == ("1f1b", "fsdp,")
    assert "1.00" in rows[2]
    [cell] = expand(load(str(file), []))
    config = cell.config
    assert (is_synchronous(config.schedule.name), config.optimizer.name) == (True, "muon")
    assert config.parallel.stages * config.parallel.data == 8
    assert tokens_per_step(config) == 2**19
    assert f"schedule.name={config.schedule.name}" in said.errors
    assert "--row 5: accepted: 1 to 4" in refusal(*words, "5")
    assert "Row 4 as settings: schedule.name=fsdp" in succeeded(*words, "4").errors
    [cell] = expand(load(str(file), []))
    check(cell.config)
    assert (cell.config.schedule.name, cell.config.schedule.keep_weights) == ("fsdp", True)
    assert tokens_per_step(cell.config) == 2**19


@pytest.mark.slow
def test_a_template_of_a_file_with_changes_trains_the_layout_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    base, file = tmp_path / "base" / "mine.yaml", tmp_path / "chosen.yaml"
    base.write_text("base: quickstart\nmatrix: {}\noptimizer: adamw\n")
    changes = ("train.microbatch_size=1", "schedule=2bw", "optimizer.lr=0.5")
    succeeded("plan", base, *changes, "--gpus", "2", "--schedule", "1f1b", "--as-template", file)
    [cell] = expand(load(str(file), []))
    found = cell.config
    assert (found.schedule.name, found.optimizer.lr) == ("1f1b", 0.5)
    assert found.parallel.stages * found.parallel.data == 2


@pytest.mark.slow
def test_a_sweep_shows_memory_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    shown = asyncpp("sweep", "quickstart", "--list")
    assert (shown.code, "GB per rank" in shown.output, "step s" in shown.output) == (0, True, False)
    large = ["model=3b", "data.context=4096", "site.gpu=h100", "matrix.schedule=1f1b"]
    shown = asyncpp("sweep", "quickstart", "--list", *large, "site.memory_gb=300")
    assert (shown.code, "step s" in shown.output) == (0, True)
    said = refusal("sweep", "quickstart", "--out", tmp_path / "e", *large, "site.memory_gb=80")
    assert "site.memory_gb: rank 0 needs" in said
    assert "a device has 80" in said
    assert "activations" in said
    assert "it would fit with train.recompute: selective" in said
    assert not (tmp_path / "e").exists()


def test_estimates_are_shared_by_cells_that_differ_in_what_changes_neither_memory_nor_time() -> None:
    def is_shared(**change: Any) -> bool:
        config = RunConfig()
        config = with_settings(config, change)
        return estimate_key(config) == estimate_key(RunConfig())

    alike = {"optimizer.lr": 0.5, "seed": 3, "data.path": "elsewhere"}
    other = {"optimizer.beta1": 0.5, "site.memory_gb": 3.0, "site.device": "cpu"}
    other["parallel.shard_gradients"] = True
    assert [key for key, value in alike.items() if not is_shared(**{key: value})] == []
    assert [key for key, value in other.items() if is_shared(**{key: value})] == []


def test_what_a_step_loses_to_the_network_is_what_it_takes_longer_than_without() -> None:
    config = layout_of("135m", "1f1b", stages=1, data=2)
    slow, fast = (
        replace(COSTS, device=replace(COSTS.device, network_gbs=gbs, gpus_per_node=1)) for gbs in (1, 1e9)
    )
    planned_for, free = (estimate(config, costs, limit_gb=None) for costs in (slow, fast))
    expected = 1 - free.step.seconds / planned_for.step.seconds
    assert expected > 0.5
    assert planned_for.losses["network"] == pytest.approx(expected, rel=1e-6)


def test_over_a_slow_link_a_delayed_all_reduce_hides_behind_the_next_step() -> None:
    words = ["135m", "--gpus", "2", "--schedule", "1f1b", "--schedule", "2bw"]
    slow, fast = (
        {
            row["schedule"]: row
            for row in planned(*words, *link)
            if row["stages"] == 1
            and (row["data_parallel"], row["microbatches"], row["recompute"]) == (2, 16, "none")
            and not row.get("ahead", 1) > 1
        }
        for link in (("--bandwidth", "1", "--gpus-per-node", "1"), ("--gpus-per-node", "1"))
    )
    assert [slow["1f1b"]["delay"], slow["2bw"]["delay"]] == [0, 1]
    # At 1 Gbit/s a step waits for nothing but the exchange; at the H100's 400 for next to nothing of it.
    assert slow["2bw"]["step_time"] < slow["1f1b"]["step_time"]
    assert fast["2bw"]["step_time"] < slow["2bw"]["step_time"]
    saved = {rate: of["1f1b"]["step_time"] - of["2bw"]["step_time"] for rate, of in ((1, slow), (400, fast))}
    assert saved[1] > saved[400]


def test_a_plan_leaves_room_for_cudas_context() -> None:
    for device in DEVICES.values():
        assert device.memory_gb - device.usable_gb >= CONTEXT_GB + 0.04 * device.memory_gb - 1e-9
    table = succeeded("plan", "135m", "--gpus", "2", "--device", "l40s", "--rows", "1")
    assert "GB, beside CUDA's context)" in table.output


@pytest.mark.parametrize("microbatches", [4, 12])
@pytest.mark.parametrize("name", CONSIDERED)
def test_a_rank_holds_no_more_messages_than_their_bound(name: str, microbatches: int) -> None:
    known = find(name).options
    heads = [(False, "false"), (False, "true"), (True, "false"), (True, "true")]
    for stages, (shard_head, tied), split, ahead in product((2, 4, 8), heads, (False, True), (1, 2)):
        if (split and "split" not in known) or (ahead > 1 and "ahead" not in known):
            continue
        options = {
            "shard_head": shard_head,
            "split": split,
            "ahead": ahead,
            "chunks": 1 + ("chunks" in known),
        }
        if shard_head and not find(name).can_shard_head:
            continue
        config = layout_of(
            "135m", name, f"model.tied={tied}", stages=stages, microbatches=microbatches, **options
        )
        try:
            memory = RankMemory(config, Found())
        except ScheduleError:
            continue
        counted, most = memory.messages, memory.messages_at_most
        assert all(held <= bound for held, bound in zip(counted, most, strict=True))


def test_a_limit_between_the_memory_without_and_with_messages_counts_them() -> None:
    planned_for = estimate(layout_of("360m", "2bw", data=2, size=2), COSTS, limit_gb=None)
    fullest = max(planned_for.memory, key=lambda kinds: sum(kinds.values()))
    assert fullest["messages"]
    assert not planned_for.exceeds(planned_for.memory_gb)
    assert planned_for.exceeds(planned_for.memory_gb - 0.5 * fullest["messages"] / 1e9)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero-bubble"])
@pytest.mark.parametrize("cut", [(2, 28), (28, 2)])
def test_no_step_is_shorter_than_its_bound_where_reductions_take_longest(
    name: str, cut: tuple[int, int]
) -> None:
    """The last stage's reduction, if it is the longest, overlaps with the backward of the first."""
    config = changed(layout_of("135m", name, stages=2, data=2, microbatches=1), {"parallel.cut": cut})
    shared = Shared(COSTS.over(gpus_per_node=1, network_gbs=2.0))
    times, seconds = shared.times(config, cut), own_estimate(config, shared).step.seconds
    assert max(times.reduction) > 0.5 * seconds
    assert 0.8 * seconds < least_with(config, shared, times) <= (1 + 1e-9) * seconds


def test_a_bound_knows_the_halves_of_blocks() -> None:
    """Of 44 blocks on 32 ranks most have three halves, and some of them two MLPs."""
    config, shared = layout_of("10b", "2bw", stages=32, data=2, microbatches=64), Shared(COSTS)
    attention, mlp = (half.forward + half.backward for half in COSTS.parts(config).halves[:2])
    assert mlp > 1.1 * attention
    assert 64 * (attention + 2 * mlp) * 0.995 < least_seconds(config, shared)
    assert least_seconds(config, shared) < own_estimate(config, shared).step.seconds


@pytest.mark.parametrize("changes", [[], ["model.tied=true"], ["model.vocab_size=200000"]])
@pytest.mark.parametrize("name", [name for name in CONSIDERED if find(name).synchronous])
def test_a_bound_of_a_flushed_step_knows_that_the_pipeline_fills(name: str, changes: list[str]) -> None:
    shared, chunks = (
        Shared(COSTS.over(gpus_per_node=1, network_gbs=2.0)),
        2 if "chunks" in find(name).options else 1,
    )
    for shard_head in (False, find(name).can_shard_head):
        of_microbatch = []
        for microbatches in (8, 32):
            numbers = {"stages": 8, "data": 2, "microbatches": microbatches}
            config = layout_of("360m", name, *changes, chunks=chunks, shard_head=shard_head, **numbers)
            bound, found = least_seconds(config, shared), own_estimate(config, shared).step.seconds
            assert bound <= (1 + 1e-9) * found
            of_microbatch.append(bound / microbatches)
        assert of_microbatch[0] > 1.02 * of_microbatch[1]


ON_CPU = "scheduler: slurm\n"
OF_H100 = "scheduler: slurm\ngpus_per_node: 8\nrun: {gpu: h100}\n"


@pytest.mark.parametrize(
    ("changes", "site", "device", "expected"),
    [
        (["site.gpu=h100"], None, None, "h100"),
        (["site.gpu=a100"], OF_H100, None, "h100"),
        (["site.device=cuda", "site.gpu=h100"], None, None, "h100"),
        ([], OF_H100, None, "h100"),
        ([], None, "h100", "h100"),
        (["site.device=cpu"], None, "h100", "h100"),
        (["site.gpu=a100"], OF_H100.replace("h100", "l40s"), "h100", "h100"),
        ([], None, None, None),
        (["site.device=cuda"], None, None, None),
        (["site.device=cpu", "site.gpu=h100"], None, None, "cpu"),
        ([], ON_CPU, None, "cpu"),
    ],
)
@pytest.mark.slow
def test_every_command_plans_for_the_same_device(
    tmp_path: Path, changes: list[str], site: str | None, device: str | None, expected: str | None
) -> None:
    """Norms, chunks of the head and buffers differ between a CPU and a GPU."""
    run = ["model=nano", "parallel.stages=2", "train.precision=bfloat16", "schedule.microbatches=4"]
    run += ["optimizer.lr=1e-3", "optimizer=adamw", "model.layers=4", "train.recompute=none", "train.steps=4"]
    template = tmp_path / "cells.yaml"
    template.write_text("name: cells\nmatrix: {schedule: [1f1b]}\n")
    options: list[str | Path] = []
    if site is not None:
        (tmp_path / "here.yaml").write_text(site)
        options = ["--site", tmp_path / "here.yaml"]
    of_device = [] if device is None else ["--device", device]
    [cell] = expand(load(str(template), run))
    config = cell.config
    config = changed(config, {"site.device": "cpu" if expected == "cpu" else "cuda"})
    own = own_estimate(config, Shared(COSTS))
    held = [{kind: round(size) for kind, size in of_rank.items()} for of_rank in own.memory]

    what = [*map(str, (template, *run, *changes)), "--gpus", "2", "--schedule", "1f1b"]
    listed = planned(*what, *map(str, options), *of_device)
    [same] = [
        row
        for row in listed
        if (row["stages"], row["microbatches"], row["recompute"], row["shard_head"]) == (2, 4, "none", False)
    ]
    assert (same["memory"], same["step_time"]) == (held, own.step.seconds)
    if expected == "h100":
        best = json.loads(succeeded("plan", *what, "--map", "--json", *options, *of_device).output)
        [point] = [point for point in best if point["tokens_per_step"] == tokens_per_step(config)]
        assert {key: point["synchronous"][key] for key in listed[0]} == listed[0]
    if device is None:
        [swept] = json.loads(
            succeeded("sweep", template, *run, *changes, "--list", "--json", *options).output
        )
        # Where nothing names a device, that is the one that runs would get here.
        of_here = {"site.device": "auto" if torch.cuda.is_available() else "cpu"}
        runs_here = own if changes or site else own_estimate(changed(config, of_here), Shared(COSTS))
        assert swept["memory_gb"] == runs_here.memory_gb
        assert swept["step_seconds"] == (own.step.seconds if expected == "h100" else None)
    if device is None and site is None:
        succeeded("sweep", template, *run, *changes, "--out", tmp_path / "e")
        rehearsed = asyncpp("rehearse", tmp_path / "e", "--csv", tmp_path / "ranks.csv")
        assert rehearsed.code in (0, 1), rehearsed.errors
        rows = list(csv.DictReader((tmp_path / "ranks.csv").read_text().splitlines()))
        of_tensors = [sum(n for kind, n in of.items() if kind not in OF_THE_DEVICE) for of in held]
        assert [int(row["planned_bytes"]) for row in rows] == of_tensors


@pytest.mark.parametrize(("stages", "refused"), [(8, False), (12, True), (16, True)])
def test_a_layout_with_more_communicators_than_a_gpu_has_queues_is_not_planned(
    stages: int, refused: bool
) -> None:
    """A run of it ends before its first step (`stages.comm.topology.connect`)."""
    chosen = {"stages": stages, "data": 2, "microbatches": 32, "shard_head": True}
    config = layout_of("360m", "2bw-v", "model.tied=true", **chosen)
    assert RankMemory(config, Found()).needs_too_many_queues == refused
    on_cpu = replace(config, site=replace(config.site, device="cpu"))
    assert not RankMemory(on_cpu, Found()).needs_too_many_queues


def test_shards_of_the_head_share_communicators_as_in_a_run() -> None:
    """Hidden states, and parts of their gradient, have one each with all ranks; sums one for each pair."""
    config = layout_of("360m", "2bw", stages=4, microbatches=16, shard_head=True)
    of_first, *_, of_last = Found().program(config).links
    assert of_first == (2 + 2 + 1, 2 + 3)
    assert of_last == (2 + 2 + 3, 2 + 3 * 3)
