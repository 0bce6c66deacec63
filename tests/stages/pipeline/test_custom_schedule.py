"""A schedule of a user's own trains as those of the family do; a wrong one is refused line by line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import asyncpp
from support.files import ROOT
from support.resumed import check_resumed, go_back, saving
from support.small_runs import Rows, in_processes, replayed, small_config
from support.training_cases import measured

from stages.comm.process import Process
from stages.config.run_config import CorrectionConfig, RunConfig
from stages.config.segments import schedule_facts
from stages.trainer import replay, train
from stages.validation import ConfigError, check

[EXAMPLE] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "schedules.md").read_text(), flags=re.DOTALL)

FURTHER = """
import sys
from dataclasses import replace
from my_schedules import *
from schedules.library.zb_v import zb_v
from schedules.segment import unflushed

def eager(segment, *, update_interval: int = 2):
    return unflushed(
        segment, schedule="eager", update_interval=update_interval, updates_together=False, stashed=True,
        ahead=1, read=lambda microbatch, newest: newest,
        initial_versions=(segment.first_microbatch // update_interval,),
        final_versions=(segment.end_microbatch // update_interval,),
    )

def v_shaped(segment):
    return zb_v(segment)

def without_last_backward(segment):
    program = gpipe(segment)
    return replace(program, actions=tuple(
        tuple(action for action in actions if action.op is not Op.BACKWARD or action.microbatch % 2)
        for actions in program.actions
    ))

def shorter(segment):
    return gpipe(replace(segment, steps=1))

def forgetful(segment):
    program = delayed_gpipe(segment)
    return replace(program, final_versions=program.final_versions[-1:])

def no_program(segment):
    return [0]

def failing(segment):
    raise KeyError("lost")

def leaving(segment):
    sys.exit(3)

number = 3
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_schedules.py").write_text(EXAMPLE)
    (tmp_path / "further.py").write_text(FURTHER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def config_of(name: str, **options: Any) -> RunConfig:
    return small_config(name, microbatches=4, **options)


@pytest.mark.parametrize(
    ("name", "like", "options"),
    [
        ("my_schedules:gpipe", "gpipe", {}),
        # The order differs; versions, and the order in which gradients are summed, are those of 2bw.
        ("my_schedules:delayed_gpipe", "2bw", {"coefficient": 1.0}),
        ("my_schedules:delayed_gpipe", "2bw", {"delay": 2}),
        ("further:eager", "pipedream", {"update_interval": 2, "clip": "stage"}),
        ("further:v_shaped", "zb-v", {}),
    ],
)
def test_it_computes_what_the_same_schedule_of_the_family_does(
    name: str, like: str, options: dict[str, Any]
) -> None:
    config, of_family = (config_of(schedule, **options) for schedule in (name, like))
    check(config)
    assert schedule_facts(config) == schedule_facts(of_family)
    weights, expected = (replay(one, recorder=Rows()).weights for one in (config, of_family))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], tensor) for key, tensor in expected.items())


def test_its_facts_are_those_of_its_program() -> None:
    facts = schedule_facts(config_of("my_schedules:delayed_gpipe"))
    assert (facts.synchronous, facts.updates_together, facts.stages) == (False, True, 2)
    with pytest.raises(ConfigError, match="corrects for delay") as refused:
        check(config_of("my_schedules:gpipe", coefficient=1.0))
    assert refused.value.key == "error_feedback"
    with pytest.raises(ConfigError, match="each stage updates on its own"):
        check(config_of("further:eager"))


def train_and_resume(process: Process, given: tuple[RunConfig, Path]) -> list[list[dict[str, Any]]]:
    """Train to the end, then again from step 2; the rows of both."""
    config, folder = given
    runs = [Rows(), Rows()]
    for rows in runs:
        train(config, process=process, recorder=rows, checkpoints=folder)
        process.gather(None)
        if process.rank == 0:
            go_back(folder, 2)
        process.gather(None)
    return [measured(rows) for rows in runs]


def test_processes_compute_the_bits_of_replay_and_go_on_to_them(tmp_path: Path) -> None:
    names = {"my_schedules:gpipe": "global", "my_schedules:delayed_gpipe": "global", "further:eager": "stage"}
    given = [
        (saving(config_of(name, clip=clip)), tmp_path / str(number))
        for number, (name, clip) in enumerate(names.items())
    ]
    by_rank = in_processes(train_and_resume, given, size=2)
    for (config, _), (whole, resumed) in zip(given, by_rank[-1], strict=True):
        rows = replayed(config)
        assert [row for row in whole if row["kind"] == "end"] == measured(rows)[-1:]
        check_resumed(whole, resumed, step=2)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("further:missing", "cannot be imported"),
        ("furthr:gpipe", "no module 'furthr'; did you mean further"),
        ("nowhere.at_all:gpipe", "cannot be imported .* name its folder in PYTHONPATH"),
        ("my_schedules:", "accepted: package.module:function"),
        ("my schedules:gpipe", "accepted: package.module:function"),
        ("further:number", "is not a function"),
        ("further:no_program", "returns list, must return a schedules.Program"),
        ("further:failing", "KeyError: 'lost'"),
        ("further:leaving", "SystemExit: 3"),
        ("further:shorter", "the program's steps is 1, must be 3"),
        ("further:forgetful", r"ends with versions \[3\], and the next begins with \[2, 3\]"),
        ("further:without_last_backward", "have no backward; first micro-batch 0 of stage 0; 12 in all"),
    ],
)
def test_untrainable_settings_are_refused_by_key(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        check(config_of(name))
    assert refused.value.key == "schedule.name"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "my_schedules:delayed_gpipe",
            r"begins at step 2 with versions \[1, 2\], but only the newest",
        ),
        ("further:v_shaped", "sync-start needs one stage a rank, in order"),
    ],
)
def test_a_synchronous_start_leaves_one_version_and_one_stage_per_rank(name: str, says: str) -> None:
    config = config_of(name)
    config.correction = CorrectionConfig(name="sync-start", sync_steps=2)
    with pytest.raises(ConfigError, match=says):
        check(config)


def test_sweep_names_every_mistake_in_a_line(tmp_path: Path) -> None:
    template = tmp_path / "t.yaml"
    template.write_text(
        'matrix: {schedule: "further:without_last_backward", optimizer: adamw}\n'
        "model: micro\nschedule.microbatches: 2\ntrain.steps: 3\nerror_feedback: false\n"
    )
    words = ("sweep", template, "--allow-code", "further,my_schedules", "--out", tmp_path / "e")
    refused = asyncpp(*words)
    assert refused.code == 2
    _, first, second = refused.errors.splitlines()
    assert "schedule.name: further:without_last_backward: " in first
    assert "further:without_last_backward: " in second
    good = template.read_text().replace("further:without_last_backward", "my_schedules:delayed_gpipe")
    template.write_text(good)
    assert asyncpp(*words).code == 0


def test_an_option_that_the_function_does_not_take_is_refused() -> None:
    config = config_of("my_schedules:gpipe")
    with pytest.raises(ConfigError, match="does not take chunks"):
        check(replace(config, schedule=replace(config.schedule, chunks=2)))
