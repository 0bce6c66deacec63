"""The analyzer against a slow walk through each stage's list."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from support.schedule_cases import programs

from schedules import Op, Program, analyze, build

SOME = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SOME
@given(programs(max_microbatches=24))
@pytest.mark.slow
def test_delay_and_mismatch(program):
    analysis = analyze(program)
    for stage in range(program.num_stages):
        delays, mismatches, forwarded_at, gathered = [], [], {}, []
        for action in program.stage_actions(stage):
            if action.op in (Op.FORWARD, Op.HEAD, Op.EMBED):
                forwarded_at[action.microbatch] = action.version
            elif action.op is Op.UPDATE:
                # At a shard of a tied head, gradients of the next update may be there already.
                due = [one for one in gathered if one < action.version * program.update_interval]
                delays += [action.version - 1 - forwarded_at[microbatch] for microbatch in due]
                gathered = [one for one in gathered if one not in due]
            else:
                mismatches.append(action.version - forwarded_at[action.microbatch])
                if action.op is not Op.BACKWARD_INPUT:
                    gathered.append(action.microbatch)
        assert analysis.delay_min[stage] == min(delays)
        assert analysis.delay_max[stage] == max(delays)
        assert analysis.mismatch_max[stage] == max(mismatches)


def unreadable(program: Program, stage: int, *, replicas: int) -> list[int]:
    """The versions that a stage misses if every update overwrites the oldest of its replicas."""
    held = list(program.initial_versions)[-replicas:]
    missing = []
    for action in program.stage_actions(stage):
        if action.op is Op.UPDATE:
            held = [*held, action.version][-replicas:]
        elif action.version not in held:
            missing.append(action.version)
    return missing + sorted(set(program.final_versions) - set(held))


@SOME
@given(programs(max_stages=6, max_microbatches=8, max_steps=6))
@example(build("pipedream", stages=3, microbatches=1, steps=3))
@example(build("pipedream", stages=5, microbatches=2, steps=2, first_step=2))
def test_versions_are_the_fewest_replicas_with_which_none_is_overwritten_too_early(program):
    versions = analyze(program).versions
    for stage in range(program.num_stages):
        assert unreadable(program, stage, replicas=versions[stage]) == []
        if (fewer := versions[stage] - 1) >= len(program.initial_versions):
            assert unreadable(program, stage, replicas=fewer)


@SOME
@given(programs(max_stages=6, max_microbatches=8))
def test_activations(program):
    analysis = analyze(program)
    for stage in range(program.num_stages):
        in_flight, most = set(), 0
        for action in program.stage_actions(stage):
            if action.op in (Op.FORWARD, Op.HEAD):
                in_flight.add(action.microbatch)
            elif action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT, Op.HEAD_WEIGHT):
                in_flight.remove(action.microbatch)
            most = max(most, len(in_flight))
        assert analysis.activations[stage] == most


@SOME
@given(programs(max_stages=6, max_microbatches=8))
def test_slack(program):
    analysis = analyze(program)
    for stage in range(program.num_stages):
        actions = program.stage_actions(stage)
        slacks = []
        for place, action in enumerate(actions):
            if action.op is not Op.UPDATE:
                continue
            between = 0
            for later in actions[place + 1 :]:
                if later.op is not Op.UPDATE and later.version == action.version:
                    slacks.append(between)
                    break
                between += later.op in (Op.FORWARD, Op.HEAD)
        assert analysis.slack[stage] == min(slacks, default=None)
