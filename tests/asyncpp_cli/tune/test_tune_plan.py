"""The plan of a tuning: arms, rungs and budget, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import asyncpp, refusal, succeeded
from support.files import contents
from support.launches import TINY

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.tune.plan import Plan, Question, budget, expected_steps, read_plan
from asyncpp_cli.tune.tuning import planned, write_tuning

RATES = "optimizer.lr=1e-4:1e-1:log"


def asked(template: str | Path, *changes: str, over: tuple[str, ...] = (RATES,), **options: Any) -> Question:
    settings: dict[str, Any] = {"samples": 8, "search_seed": None, "eta": 2, "rungs": (0.125, 0.25)}
    return Question(template=str(template), changes=changes, over=over, **settings | options)


def plan_for(template: str | Path, *changes: str, **options: Any) -> Plan:
    return planned(asked(template, *changes, **options)).plan


def test_the_quickstart_takes_at_least_two_and_a_half_times_fewer_steps_than_its_grid() -> None:
    plan = plan_for("quickstart")
    assert len(plan.arms) == 6
    assert {arm.rungs for arm in plan.arms} == {(37, 75, 300)}
    assert {len(arm.candidates) for arm in plan.arms} == {8}
    rungs = budget(plan)
    assert [each.runs for each in rungs] == [48, 24, 12]
    steps, grid_steps = sum(each.steps for each in rungs), sum(arm.grid_steps for arm in plan.arms)
    assert steps == sum(expected_steps(plan).values())
    assert grid_steps == 6 * 8 * 300
    assert grid_steps >= 2.5 * steps


def test_every_arm_tries_the_same_points_in_cells_of_its_own() -> None:
    plan = plan_for("quickstart", "matrix.seed=[0,1]", search_seed=3)
    points = [[candidate.values for candidate in arm.candidates] for arm in plan.arms]
    assert all(of_arm == points[0] for of_arm in points)
    runs = [run for arm in plan.arms for candidate in arm.candidates for run in candidate.runs]
    assert len(set(runs)) == len(runs) == 6 * 8 * 2


def test_settings_of_the_template_for_some_cells_give_way(tmp_path: Path) -> None:
    """A tuned key on an axis, in an override, in a condition to exclude, and cells that are included."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "matrix: {schedule: [1f1b, 2bw], optimizer.lr: [1e-3, 2e-3]}\n"
        "include: [{schedule: gpipe, optimizer.lr: 5e-3}]\n"
        "exclude: [{schedule: 1f1b, optimizer.lr: 2e-3}]\n"
        "overrides: [{when: {schedule: 2bw}, set: {optimizer.lr: 9e-3, optimizer.beta2: 0.9}}]\n"
        "optimizer: adamw\nmodel: micro\nseed: 0\nparallel: {stages: 2}\ntrain: {steps: 8}\n"
    )
    made = planned(asked(file, samples=4))
    assert [arm.axes["schedule"] for arm in made.plan.arms] == ["1f1b", "2bw", "gpipe"]
    assert len(made.cells) == 12
    usual = made.cells[0].config.optimizer.beta2
    for resolved in made.cells:
        assert resolved.config.optimizer.lr == resolved.cell.axes["optimizer.lr"]
        assert resolved.config.optimizer.beta2 == (0.9 if resolved.config.schedule.name == "2bw" else usual)


def test_rungs_are_where_a_pause_changes_no_number() -> None:
    """paci drains at its evaluations alone; all arms have the same rungs."""
    changes = ("matrix.schedule=[1f1b,paci]", "train.clip=stage", "exclude=[]", "train.eval_interval=50")
    plan = plan_for("quickstart", *changes, "matrix.error_feedback=[false]")
    assert {arm.rungs for arm in plan.arms} == {(50, 100, 300)}


@pytest.mark.parametrize(
    ("eta", "samples", "shares", "rungs"),
    [
        *((3, 8, (0.125, 0.25), (37, 75, 300)), (2, 2, (0.125, 0.25), (37, 300))),
        *((8, 8, (0.125, 0.25), (37, 300)), (2, 8, (0.001, 0.5), (1, 150, 300)), (2, 8, (), (300,))),
    ],
)
def test_rungs(eta: int, samples: int, shares: tuple[float, ...], rungs: tuple[int, ...]) -> None:
    """None at which one candidate is left."""
    assert plan_for("quickstart", eta=eta, samples=samples, rungs=shares).arms[0].rungs == rungs


@pytest.mark.parametrize("text", ["half", "0.5,0.25", "0,0.5", "0.5,1", ""])
def test_rungs_that_are_refused(text: str) -> None:
    words = ("tune", "quickstart", "--over", RATES, "--rungs", text, "--dry-run")
    assert "increasing shares between 0 and 1" in refusal(*words)


@pytest.mark.parametrize("key", ["train.steps", "seed"])
def test_steps_and_seeds_are_no_candidates(key: str) -> None:
    said = refusal("tune", "quickstart", "--over", f"{key}=[10,20]", "--dry-run")
    assert f"--over {key} cannot be tuned; accepted: an axis, matrix.{key}=[...]" in said


def test_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(UserError, match="nothing to choose from"):
        plan_for("quickstart", over=("optimizer.lr=[1e-3]",))
    with pytest.raises(UserError, match="--over KEY=RANGE"):
        plan_for("quickstart", over=())


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    arguments = ["tune", "quickstart", *TINY, "--over", RATES, "--out", tmp_path / "e", "--dry-run"]
    ended = succeeded(*arguments)
    assert "2.7 times fewer" in ended.errors
    shown = json.loads(asyncpp(*arguments, "--json").output)
    assert (shown["arms"], shown["runs"], shown["grid_steps"]) == (6, 48, 14400)
    assert list(tmp_path.iterdir()) == []


def test_another_tuning_in_the_same_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    question = asked("quickstart", *TINY, samples=2)
    write_tuning(question, out=folder)
    before = contents(folder)
    write_tuning(question, out=folder)
    assert contents(folder) == before
    words = f"quickstart {' '.join(TINY)} --over {RATES} --samples 2 --eta 2 --rungs 0.125,0.25"
    said = refusal("tune", "quickstart", *TINY, "--over", RATES, "--samples", "3", "--out", folder)
    assert f"another tuning ({words})" in said
    changed = asyncpp("tune", folder, "train.steps=7")
    assert (changed.code, contents(folder)) == (2, before)
    assert len(open_experiment(folder).cells) == 12


def test_a_damaged_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tune.json").write_text('{"format": 1, "question": {}}')
    with pytest.raises(UserError, match=r"question\.template is missing"):
        read_plan(tmp_path)
