"""Steps by a short program that stands for a layout's, beside those of the whole program."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest
from support.planned import COSTS, layout_of

import schedules
from asyncpp_cli.planner.cuts import cuts_to_try
from asyncpp_cli.planner.estimate import own_estimate
from asyncpp_cli.planner.memory import GB, BlocksMemory, RankMemory
from asyncpp_cli.planner.pace import Pace
from asyncpp_cli.planner.programs import BUSY_LINK, Geometry, LayoutProgram
from asyncpp_cli.planner.shared import Shared, layout_cuts, own_cut_of
from asyncpp_cli.planner.stage_times import StageTimes
from schedules import FAMILY
from schedules.costs import uniform_costs
from schedules.simulate import segment_step_time, simulate
from stages.config.run_config import RunConfig, changed

NEAR = 0.01
"""Micro-batches beyond those of the short program are taken to be as fast as the last ones that it has."""


def drawn(generator: random.Random, *, stages: int, ranks: int = 0) -> StageTimes:
    """Stages that are alike or up to five times as slow; with `ranks`, the head is in shards."""
    alike = generator.random() < 0.3
    of_shards, without_shards = (0.0,) * ranks, (0.0,) * stages

    def each(low: float, high: float) -> tuple[float, ...]:
        one = generator.uniform(low, high)
        return (*(one if alike else generator.uniform(low, high) for _ in range(stages)), *of_shards)

    head = (*without_shards, *(generator.uniform(0, 0.3) for _ in range(ranks)))
    count = stages + ranks
    # Of a step with more micro-batches than stages messages do not keep links busy.
    return StageTimes(
        forward=each(0.7, 1.5),
        backward=each(0.7, 3.0),
        input_half=each(0.7, 1.5),
        weight_half=each(0.7, 1.5),
        update=(generator.choice((0.0, 0.2, 1.0)),) * count,
        reduction=(generator.choice((0.0, 2.0, 8.0)),) * count,
        message=(generator.choice((0.0, 0.1, 0.4)),) * count,
        head=head if ranks else (),
        head_weight=tuple(seconds / 2 for seconds in head) if ranks else (),
    )


def whole(config: RunConfig) -> LayoutProgram:
    """The program of all micro-batches of a step."""
    geometry = Geometry.of(config)
    shape = geometry.shape._replace(microbatches=config.schedule.microbatches)
    return LayoutProgram(Geometry(shape, 0, 1, geometry.is_flushed))


CASES = [
    *((name, {}) for name in ("1f1b", "zero-bubble", "zb-v", "v-half", "2bw", "pipedream", "paci", "paci-v")),
    *(("interleaved-1f1b", {"chunks": chunks}) for chunks in (2, 3)),
    *(("2bw-v", {"ahead": ahead, "split": split}) for ahead in (1, 2) for split in (False, True)),
    ("2bw", {"ahead": 2}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_step_of_many_microbatches_takes_as_long_as_its_whole_program(
    name: str, options: dict[str, int]
) -> None:
    generator, member = random.Random(f"{name} {options}"), schedules.find(name)
    for _ in range(3):
        ranks = generator.randint(2, 4)
        chunks = options.get("chunks", member.stages_per_rank)
        microbatches = ranks * generator.randint(9, 11)
        microbatches += 0 if "chunks" in options else generator.randrange(ranks)
        shard_head = member.can_shard_head and generator.random() < 0.4
        sizes = {"stages": ranks, "microbatches": microbatches, "shard_head": shard_head}
        config = layout_of("7b", name, **sizes, **options)
        times = drawn(generator, stages=ranks * chunks, ranks=ranks * shard_head)
        geometry = Geometry.of(config)
        assert geometry.further > 0
        short, full = LayoutProgram(geometry), whole(config)
        placed = [*short.rank_of_stage, short.rank_of_stage[-1]]
        message = (0.0 if one == other else times.message[0] for one, other in pairwise(placed))
        times = replace(times, message=tuple(message))
        pace = 0.0 if member.synchronous else Pace(geometry.shape).seconds(times)
        found, exact = short.step(times, pace=pace), full.step(times, pace=pace)
        assert found.seconds == pytest.approx(exact.seconds, rel=NEAR), (config.schedule, times)
        assert found.bubble == pytest.approx(exact.bubble, abs=NEAR)
        if not member.synchronous:
            assert max(times.forward) < pace <= exact.seconds / microbatches * (1 + 1e-9)
        assert LayoutProgram(geometry).least_seconds(times) == 0
        for before in (times, drawn(generator, stages=ranks * chunks, ranks=ranks * shard_head)):
            known = LayoutProgram(geometry)
            known.step(replace(before, message=times.message), pace=pace)
            least = known.least_seconds(times)
            assert least <= found.seconds * (1 + 1e-9)
            # Of other times it may be nothing, where they do not make stages wait for reductions.
            assert least > 0 or before is not times
        held = (short.course, full.course)
        for kind in ("versions", "mismatch", "in_flight") + ("moments",) * (not shard_head):
            assert getattr(held[0], kind) == getattr(held[1], kind)
        assert short.delay == full.delay


def test_a_long_update_does_not_hide_that_further_microbatches_wait_for_messages() -> None:
    config = layout_of("7b", "2bw", stages=4, microbatches=64, ahead=2)
    times = StageTimes(
        forward=(1.2, 0.8, 0.8, 1.0),
        backward=(2.6, 1.7, 1.7, 2.1),
        input_half=(1.4, 0.9, 0.9, 1.1),
        weight_half=(1.2, 0.8, 0.8, 1.0),
        update=(6.0, 2.0, 2.0, 3.0),
        reduction=(0.0,) * 4,
        message=(0.1, 3.5, 0.1, 0.0),
    )
    short, exact = LayoutProgram(Geometry.of(config)), whole(config).step(times, pace=0.0).seconds
    pace = Pace(short.geometry.shape).seconds(times)
    assert short.step(times, pace=0.0).seconds < (1 - 2 * NEAR) * exact
    assert short.step(times, pace=pace).seconds == pytest.approx(exact, rel=NEAR)


NEVER_FLUSHED = [case for case in CASES if not schedules.find(case[0]).synchronous]


@pytest.mark.parametrize(("name", "options"), NEVER_FLUSHED)
@pytest.mark.parametrize("microbatches", [8, 24])
def test_memory_is_at_least_that_of_a_pace_and_no_layout_that_fits_is_refused_by_it(
    name: str, options: dict[str, int], microbatches: int
) -> None:
    shared, refused = Shared(COSTS), 0
    for stages, shard_head in ((2, False), (4, False), (8, False), (4, schedules.find(name).can_shard_head)):
        if microbatches < stages * options.get("ahead", 1):
            continue
        config = layout_of(
            "7b", name, stages=stages, microbatches=microbatches, shard_head=shard_head, **options
        )
        exact = RankMemory(config, shared)
        least = BlocksMemory(config, shared, shared.pace(config))
        cut = own_cut_of(config)
        held = [sum(kinds.values()) for kinds in exact.of_cut(cut)]
        for rank, most in enumerate(held):
            stages_of = {
                stage: each
                for stage, each in enumerate(layout_cuts(config, cut))
                if stage in least.program.stages_of_rank[rank]
            }
            assert 0.5 * most < sum(least.of_rank(rank, stages_of).values()) <= most
        for limit_gb in (share * max(held) / GB for share in (0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)):
            fits = bool(cuts_to_try(config, shared, limit_gb=limit_gb))
            assert least.may_fit(limit_gb=limit_gb) or not fits
            refused += not least.may_fit(limit_gb=limit_gb)
    assert refused


def test_a_message_takes_the_link_between_its_ranks() -> None:
    """Two nodes of four ranks: the boundary between them alone is slow."""
    config = layout_of("7b", "1f1b", stages=8, microbatches=16)
    costs = COSTS.over(gpus_per_node=4, network_gbs=1.0)
    messages = Shared(costs).times(config, own_cut_of(config)).message
    assert messages[3] == max(messages)
    assert messages[3] > 20 * messages[0]
    assert [each for number, each in enumerate(messages[:7]) if number != 3] == [messages[0]] * 6
    near, far, some = (
        own_estimate(config, Shared(COSTS.over(gpus_per_node=node, network_gbs=1.0))).step.seconds
        for node in (8, 1, 4)
    )
    assert near < some < far


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min", "interleaved-1f1b", "2bw-v", "paci-v"])
def test_messages_hardly_meet_on_a_link_that_is_less_busy(name: str) -> None:
    for share, ranks, rounds in product((BUSY_LINK / 2, BUSY_LINK), (2, 3, 4, 8), (1, 4)):
        program = schedules.build(name, stages=ranks, microbatches=rounds * ranks, steps=12, chunks=2)
        message = share * 3 / 2 / 2
        late, shared = (
            segment_step_time(simulate(program, replace(uniform_costs(program), **{kind: message})))
            for kind in ("latency", "transfer")
        )
        assert late * 0.999 <= shared <= 1.1 * late, (share, ranks, rounds)


def test_what_hides_a_reduction_takes_longer_as_beside_fsdp() -> None:
    waiting, hiding = (layout_of("7b", name, data=16, microbatches=8) for name in ("1f1b", "2bw"))
    cut = own_cut_of(hiding)
    at_once, late = (Shared(COSTS).times(config, cut).update for config in (waiting, hiding))
    added = [after - before for before, after in zip(at_once, late, strict=True)]
    reduction = Shared(COSTS).times(hiding, cut).reduction
    # A fifth of its time, and the memory traffic of its bytes: a ninth of them as fast as the network.
    within = 50 / (450 * 0.8)
    assert added == pytest.approx([(0.2 + 0.6 * within) * seconds for seconds in reduction])
    hiding = changed(hiding, {"parallel.shard_gradients": True})
    assert Shared(COSTS).times(hiding, cut).update == at_once


@pytest.mark.parametrize("name", [name for name, schedule in FAMILY.items() if schedule.can_shard_head])
@pytest.mark.parametrize("shard_head", [False, True])
def test_an_update_interval_of_all_microbatches_is_planned_as_none(name: str, shard_head: bool) -> None:
    config = layout_of("7b", name, microbatches=64, shard_head=shard_head)
    planned = own_estimate(config, Shared(COSTS)).step
    config = changed(config, {"schedule.update_interval": config.schedule.microbatches})
    assert own_estimate(config, Shared(COSTS)).step == planned
