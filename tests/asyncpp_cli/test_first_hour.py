"""The first hour on a GPU, up to what needs one: its commands exist, and a failing step ends no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.launches import wait_for

from benchmarks.results import pages

ROOT = Path(__file__).parents[2]
OTHER_SETTINGS = ("modules loaded lazily", "8 hardware queues", "one hardware queue")


@pytest.fixture
def first_hour(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import first_hour

    return first_hour


def test_a_step_that_fails_or_hangs_ends_no_other_and_leaves_no_child(first_hour, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A child keeps the output open: a step whose child lived on would end after ten minutes."""
    hangs = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print(child.pid, flush=True); time.sleep(600)"
    )
    steps = [
        first_hour.Step("One?", ("-c", "print('seen'); raise SystemExit(3)"), 0, 1),
        first_hour.Step("Two?", ("-c", hangs), 0, 0.1),
        first_hour.Step("Three?", ("-c", "print('whole')"), 0, 1),
    ]
    outcomes = first_hour.perform(steps, folder=tmp_path)
    assert [each.ended for each in outcomes] == ["failed (3)", "ended after 0.1 minutes", "ok"]
    pid = int(outcomes[1].output)
    page = first_hour.page(outcomes, device="none")
    assert all(word in page for word in ("# The first hour", "seen", str(pid), "whole", "| Two? |"))
    child = Path(f"/proc/{pid}/stat")
    # A killed process closes its output a moment before it counts as dead.
    wait_for(lambda: not child.exists() or child.read_text().split()[2] == "Z", seconds=300)


def test_the_page_states_every_condition(first_hour, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    outcome = first_hour.Outcome(first_hour.STEPS[0], "ok", 1.0, "seen")
    first_hour.write(tmp_path, [outcome], device="1 x a GPU")
    [file] = tmp_path.iterdir()
    # Its commit may have changes here, or be none.
    assert [problem for problem in pages.problems(file) if "commit" not in problem] == []


def test_every_step_names_a_command_that_is_there(first_hour) -> None:  # type: ignore[no-untyped-def]
    for step in first_hour.STEPS:
        if step.command[0] != "-m":
            text = (ROOT / step.command[0]).read_text()
            assert all(f'"{word}"' in text for word in step.command if word.startswith("--"))
    assert [step.begins for step in first_hour.STEPS] == sorted(step.begins for step in first_hour.STEPS)


@pytest.mark.slow
def test_its_experiments_train_and_are_profiled(
    first_hour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    """With a small model, the rest as it stands; where there is no polars all but the report."""
    small = ("model=micro", "data.context=32", "train.steps=4", "train.eval_interval=2")
    small += ("matrix.optimizer=[muon]",)
    steps = [
        step._replace(command=(*step.command, *(small if "sweep" in step.command else ())), limit=60)
        for step in first_hour.STEPS
        if any(first_hour.FOLDER in word for word in step.command)
    ]
    [showing] = [step for step in steps if "report" in step.command]
    with monkeypatch.context() as patch:
        (tmp_path / "without").mkdir()
        (tmp_path / "without/polars.py").write_text("raise ImportError('no polars')")
        patch.setenv("PYTHONPATH", str(tmp_path / "without"), prepend=":")
        outcomes = first_hour.perform([step for step in steps if step != showing], folder=tmp_path)
    outcomes += first_hour.perform([showing], folder=tmp_path)
    assert [each.ended for each in outcomes] == ["ok"] * 5, outcomes
    [report] = [each.output for each in outcomes if "report" in each.step.command]
    assert all(name in report for name in ("1f1b", "2bw", "muon"))
    profiles = [*(tmp_path / "profiled").rglob("rank-*.profile.json")]
    assert len(profiles) == 8  # one rank and two of 1f1b and of fsdp, two of 2bw


@pytest.mark.slow
def test_what_a_host_waits_for_is_measured_on_a_cpu_too(first_hour, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    [step] = [step for step in first_hour.STEPS if step.command == ("benchmarks/gpu_facts.py",)]
    on_cpu = (*step.command, "--device", "cpu", "--seconds", "0.05", "--json")
    [outcome] = first_hour.perform([step._replace(command=on_cpu)], folder=tmp_path)
    assert outcome.ended == "ok", outcome.output
    rows = json.loads(outcome.output)["rows"]
    assert {row["setting"] for row in rows if row["what"] == "another stream"} == {
        "of a run",
        *OTHER_SETTINGS,
    }
    assert [row["what"] for row in rows[-4:]] == ["context, with one tensor", "group", "second group", "link"]


def test_the_page_says_whether_nccl_was_used(first_hour) -> None:  # type: ignore[no-untyped-def]
    assert "no NCCL" in first_hour.device_words("H100", count=1)
    assert first_hour.device_words("H100", count=2) == "2 x H100 (NCCL between two ranks)"


def test_without_a_gpu_it_says_so(first_hour, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert first_hour.main([]) == 2
    assert "finds no GPU" in capsys.readouterr().err
    assert first_hour.main(["--list", "--minutes", "5"]) == 0
    assert "doctor" in capsys.readouterr().out
