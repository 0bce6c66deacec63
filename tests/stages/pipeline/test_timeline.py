"""When the ranks of a real pipeline did the last actions of a segment."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import pytest
from support.small_runs import in_processes, replayed, small_config, trained_here

from schedules.actions import Action, Op, parse_action
from stages.config.run_config import RunConfig
from stages.config.segments import segment_program
from stages.pipeline.timeline import MOST_ACTIONS, STEPS, Meeting, kept_actions, timeline
from stages.update.rank_stats import RankTrace, StageTrace

MICROBATCHES = 4
TRAINED = 9
DRAIN = 6
"""Steps of the first segment, which is longer than a timeline; the second is shorter."""


def runs() -> list[RunConfig]:
    return [
        small_config(
            schedule,
            microbatches=MICROBATCHES,
            layers=4,
            steps=TRAINED,
            eval_interval=DRAIN,
            chunks=2 if schedule == "interleaved-1f1b" else 1,
        )
        for schedule in ("1f1b", "zero-bubble", "2bw", "pipedream", "interleaved-1f1b")
    ]


@pytest.mark.slow
def test_a_pipelines_timeline_is_its_program_in_order() -> None:
    configs = runs()
    first, last = in_processes(trained_here, configs, size=2)
    # Only the rank of the last stage writes.
    assert not any(rows.timelines for rows in first)
    for config, rows in zip(configs, last, strict=True):
        written = rows.timelines
        assert [(one["first_step"], one["steps"]) for one in written] == [
            (0, DRAIN),
            (DRAIN, TRAINED - DRAIN),
        ]
        for one in written:
            check(one, config)
        begun = [
            parse_action(text) for of_rank in written[0]["ranks"] for text, start, _ in of_rank if not start
        ]
        assert any((action.stage, action.microbatch % MICROBATCHES) == (0, 0) for action in begun)
        # The second is whole.
        assert written[1]["steps_kept"] == TRAINED - DRAIN
        assert written[0]["steps_kept"] == STEPS < DRAIN


def check(written: dict[str, Any], config: RunConfig) -> None:
    program = segment_program(config, first_step=written["first_step"], steps=written["steps"])
    name = config.schedule.name
    spans: dict[tuple[int, Op, int], tuple[int, int]] = {}
    whole = written["steps_kept"] == written["steps"]
    for of_program, of_rank in zip(program.actions, written["ranks"], strict=True):
        done = [parse_action(text) for text, _, _ in of_rank]
        for updates in (False, True):
            # An update is made where the pipeline has room for it, with those of the rank's other stages.
            asked = [action for action in of_program if (action.op is Op.UPDATE) == updates]
            asked.sort(key=lambda action: (action.version, action.stage) if updates else 0)
            got = [action for action in done if (action.op is Op.UPDATE) == updates]
            assert got, name
            assert got == asked[-len(got) :], name
            assert not whole or len(got) == len(asked), name
        # One at a time.
        assert all(start <= end for _, start, end in of_rank), name
        assert all(end <= start + 1 for (_, _, end), (_, start, _) in pairwise(of_rank)), name
        spans |= {
            (action.stage, action.op, action.microbatch): (start, end)
            for action, (_, start, end) in zip(done, of_rank, strict=True)
            if action.op is not Op.UPDATE
        }
    assert min(start for start, _ in spans.values()) == 0 or not whole
    passed_on = 0
    for (stage, op, microbatch), (start, _) in spans.items():
        reader = (stage + 1 if op is Op.FORWARD else stage - 1, op, microbatch)
        if op is not Op.BACKWARD_WEIGHT and reader in spans:
            # Its message comes out of this action; how soon this one is at its end is the host's matter.
            assert spans[reader][0] >= start, name
            passed_on += 1
    assert passed_on > MICROBATCHES, name


@pytest.mark.slow
def test_a_replay_has_no_timeline() -> None:
    rows = replayed(runs()[2])
    assert rows.timelines == []


def of_times(stage: int, times: list[tuple[float, float]], *, performed: int) -> RankTrace:
    trace = RankTrace(stages={stage: StageTrace()}, latest=deque(maxlen=len(times)))
    skipped = performed - len(times)
    for number, (start, end) in enumerate([(0.0, 0.0)] * skipped + times):
        trace.note_action(Action(stage, Op.FORWARD, number, 0), start, end)
    return trace


def test_hosts_are_set_by_the_meeting_and_ranks_of_one_host_share_its_clock() -> None:
    traces = {
        0: of_times(0, [(101.0, 102.0)], performed=1),
        1: of_times(1, [(102.0, 103.0)], performed=1),
        2: of_times(2, [(9003.0, 9004.0)], performed=1),
    }
    met = {
        0: Meeting(host="a", left=100.5),
        1: Meeting(host="a", left=100.0),
        2: Meeting(host="b", left=9000.0),
    }
    written = timeline(traces, met, first_step=3, steps=1, microbatches=1)
    assert [of_rank[0][1:] for of_rank in written["ranks"]] == [
        [0, 1_000_000],
        [1_000_000, 2_000_000],
        [2_000_000, 3_000_000],
    ]


@pytest.mark.parametrize(("microbatches", "kept"), [(2, 1.0), (16, 2.0)])
def test_the_timeline_begins_with_a_step_that_all_ranks_have_recorded(microbatches: int, kept: float) -> None:
    traces = {
        0: of_times(0, [(float(n), n + 1.0) for n in range(5, 9)], performed=16),
        1: of_times(1, [(float(n), n + 1.0) for n in range(7, 11)], performed=16),
    }
    met = dict.fromkeys(traces, Meeting(host="a", left=0.0))
    written = timeline(traces, met, first_step=0, steps=8, microbatches=microbatches)
    # Where none has, it begins where the records of all ranks overlap.
    assert written["steps_kept"] == kept
    assert [[text for text, _, _ in of_rank] for of_rank in written["ranks"]] == [
        ["0F14@0", "0F15@0"],
        ["1F12@0", "1F13@0", "1F14@0", "1F15@0"],
    ]
    assert written["ranks"][0][0][1] == 0


@pytest.mark.parametrize(
    ("actions", "steps", "kept"), [(170, 10, 85), (34, 2, 85), (10_000, 5, MOST_ACTIONS)]
)
def test_the_number_of_kept_actions_is_bounded(actions: int, steps: int, kept: int) -> None:
    assert kept_actions(actions, steps=steps) == kept
