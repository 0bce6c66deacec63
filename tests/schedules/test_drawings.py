"""Charts, pictures and traces show what the timeline says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from support.schedule_cases import programs

from schedules import Op, ScheduleError, build
from schedules.costs import uniform_costs
from schedules.io.chrome_trace import chrome_trace
from schedules.io.picture import draw
from schedules.io.text_gantt import gantt
from schedules.simulate import simulate


def timeline(name="2bw", **asked):
    program = build(name, **{"stages": 2, "microbatches": 2, "steps": 2} | asked)
    return simulate(program, uniform_costs(program))


def lines(of, **options):
    return ["".join(piece.text for piece in line) for line in gantt(of, **options)]


def test_the_chart_of_two_stages():
    assert lines(timeline()) == [
        "time   0 to 14",
        "rank 0 F0@0 F1@0 ..........B0@0      F2@0 B1@0      F3@0 B2@0      .....B3@0 ",
        "rank 1 .....F0@0 B0@0      F1@0 B1@0      F2@0 B2@0      F3@0 B3@0   U1|",
        "",
        "time   14 to 15",
        "rank 0   U1|",
        "rank 1 ",
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(max_stages=6, max_microbatches=12, max_steps=2))
def test_charts_fit_80_columns_and_name_every_action_with_its_version(program):
    costs = uniform_costs(program, head=float(program.head_shards))
    if program.tied_shards:
        looked_up = (1.0,) * program.num_stages
        costs = replace(costs, embed=looked_up, embed_weight=looked_up)
    drawn = lines(simulate(program, costs))
    assert max(len(line) for line in drawn) <= 80
    for rank, actions in enumerate(program.actions):
        words = re.split("[.| ]", " ".join(line[7:] for line in drawn if line.startswith(f"rank {rank} ")))
        for action in actions:
            label = str(action)
            if program.num_stages == program.num_ranks:
                label = label[len(str(action.stage)) :]
            if action.op is not Op.UPDATE:
                assert words.count(label) == 1, label


def test_charts_of_many_chunks_name_the_stage():
    drawn = lines(timeline("interleaved-1f1b", chunks=2))
    assert "2F1@0" in drawn[1]


def test_boxes_of_a_version_share_its_colour():
    pieces = [piece for line in gantt(timeline("pipedream", steps=3)) for piece in line]
    for label, version in (("F3@2", 2), ("F3@3", 3), ("B3@2", 2), ("B3@3", 3)):
        assert {piece.version for piece in pieces if piece.text.startswith(label)} == {version}
    assert {piece.version for piece in pieces if piece.text.startswith(("rank", "time", "."))} == {None}


def test_charts_of_measured_costs_and_slow_updates_stay_readable():
    program = build("1f1b", stages=2, microbatches=2, steps=1)
    costs = uniform_costs(program, forward=0.0123, backward=0.0301, update=0.05, latency=0.001)
    drawn = lines(simulate(program, costs))
    assert max(len(line) for line in drawn) <= 80
    assert any("U1" in line for line in drawn)


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
@pytest.mark.slow
def test_pictures_are_written_the_same_each_time(tmp_path, suffix):
    timelines = [timeline("1f1b"), timeline("2bw"), timeline("zero-bubble")]
    files = [tmp_path / f"{number}.{suffix}" for number in range(2)]
    for file in files:
        draw(timelines, titles=["a", "b", "c"], file=file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_size > 2000


@pytest.mark.slow
def test_a_picture_has_a_box_an_action(tmp_path):
    file = tmp_path / "x.svg"

    def boxes(of):
        draw([of], titles=["x"], file=file)
        return file.read_text(encoding="utf-8").count("clip-path")

    # Each micro-batch more is a forward, a backward and their two numbers at either stage, each clipped to
    # the panel.
    few, some, more = (boxes(timeline("gpipe", microbatches=m, steps=1)) for m in (2, 3, 4))
    assert more - some == some - few > 0


def test_other_kinds_of_picture_are_refused(tmp_path):
    with pytest.raises(ScheduleError, match=r"x\.gif: a picture is a file of \.svg, \.png, \.pdf"):
        draw([timeline()], titles=["x"], file=tmp_path / "x.gif")


def test_the_trace_has_every_action_with_its_time_version_and_row():
    of = timeline()
    trace = json.loads(json.dumps(chrome_trace(of, microseconds_per_unit=1000.0)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    shown = {(event["tid"], event["name"]): event for event in spans}
    assert len(shown) == len(spans) == sum(len(actions) for actions in of.program.actions)
    last_backward = shown[0, "0B3@0"]
    assert (last_backward["ts"], last_backward["dur"]) == (13_000.0, 2_000.0)
    assert last_backward["args"] == {"stage": 0, "version": 0, "microbatch": 3, "step": 1}
    for rank in range(2):
        in_order = sorted(
            (event["ts"], event["ts"] + event["dur"]) for event in spans if event["tid"] == rank
        )
        assert all(end <= start for (_, end), (start, _) in pairwise(in_order))
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["rank 0", "rank 1"]
