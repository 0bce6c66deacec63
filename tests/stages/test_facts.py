"""A run's facts are those of its segments' programs, and a configuration stays as it was made."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.small_runs import small_config

from schedules import NAMES, analyze, verify
from stages.config.run_config import RunConfig, changed
from stages.resolve.checks import check, resolve
from stages.resolve.facts import Resolved, facts

LAYOUTS = {
    "parallel.stages": st.integers(1, 4),
    "parallel.data": st.integers(1, 3),
    "parallel.shard_head": st.sampled_from([False, False, True]),
    "schedule.microbatches": st.integers(1, 8),
    "schedule.delay": st.sampled_from([1, 1, 2, 3]),
    "schedule.ahead": st.sampled_from([1, 1, 2]),
    "model.layers": st.just(8),
    "train.clip": st.just("none"),
    "train.steps": st.integers(1, 12),
    "train.eval_interval": st.integers(1, 9),
    "train.checkpoint_interval": st.integers(0, 9),
}


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(NAMES), st.fixed_dictionaries(LAYOUTS))
def test_facts_hold_for_every_segment(schedule: str, layout: dict[str, Any]) -> None:
    run = resolve(changed(small_config(), {"schedule.name": schedule, **layout}))
    assume(isinstance(run, Resolved))
    assert isinstance(run, Resolved)
    segments = run.segments()
    assert sum(steps for _, steps in segments) == run.config.train.steps
    seen = []
    for first_step, steps in segments:
        program = run.program(first_step=first_step, steps=steps)
        verify(program)
        assert program.rank_of_stage == run.rank_of_stage
        assert program.num_stages == len(run.cuts)
        seen.append(analyze(program))
    for name, choose in (("delay_min", min), ("delay_max", max), ("mismatch_max", max), ("versions", max)):
        of_stages = zip(*(getattr(analysis, name) for analysis in seen), strict=True)
        assert getattr(run.staleness, name) == tuple(map(choose, of_stages))
    if run.schedule.synchronous:
        assert all(analysis.synchronous for analysis in seen)
    blocks = [half for cut in run.cuts for half in cut.halves]
    assert blocks == list(range(2 * run.config.model.layers))


def test_facts_are_those_of_the_checked_run() -> None:
    config = small_config("2bw", stages=3, microbatches=4)
    assert facts(config) == check(config)


def test_every_problem_that_no_other_explains_is_named_at_once() -> None:
    """A wrong model says nothing of the schedule, whose stages depend on it, but of data and rates."""
    wrong = {"model.heads": 3, "schedule.delay": 0, "optimizer.decay_share": 0.5, "data.headline": "wiki"}
    found = resolve(changed(small_config(), wrong))
    assert isinstance(found, list)
    assert [problem.key for problem in found] == ["schedule.delay"]
    found = resolve(changed(small_config(), {**wrong, "schedule.delay": 1}))
    assert isinstance(found, list)
    assert [problem.key for problem in found] == ["model.heads", "optimizer.decay_share", "data.headline"]


@pytest.mark.parametrize("section", ["schedule", "optimizer", "model", "data", "parallel", "train", "site"])
def test_a_configuration_is_frozen(section: str) -> None:
    config = small_config()
    with pytest.raises(FrozenInstanceError):
        setattr(config, section, getattr(RunConfig(), section))
    with pytest.raises(FrozenInstanceError):
        getattr(config, section).name = "another"


def test_a_changed_configuration_leaves_the_first_as_it_was() -> None:
    config = small_config()
    other = changed(config, {"train.steps": 9, "optimizer.options": {"a": 1}, "seed": 3})
    assert (config.train.steps, config.seed, config.optimizer.options) == (4, 0, {})
    assert (other.train.steps, other.seed, other.optimizer.options) == (9, 3, {"a": 1})
    assert other.model is config.model
