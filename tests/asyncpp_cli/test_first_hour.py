"""The first hour on a GPU, up to what needs one: its commands exist, and a failing step ends no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.launches import wait_for

from benchmarks import check_results

ROOT = Path(__file__).parents[2]


@pytest.fixture
def first_hour(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import first_hour

    return first_hour


def test_a_step_that_fails_or_hangs_ends_no_other(first_hour) -> None:  # type: ignore[no-untyped-def]
    steps = [
        first_hour.Step("One?", ("-c", "print('seen'); raise SystemExit(3)"), 0, 1),
        first_hour.Step("Two?", ("-c", "print('also', flush=True); import time; time.sleep(99)"), 0, 0.1),
        first_hour.Step("Three?", ("-c", "print('whole')"), 0, 1),
    ]
    outcomes = first_hour.perform(steps)
    assert [each.ended for each in outcomes] == ["failed (3)", "ended after 0.1 minutes", "ok"]
    page = first_hour.page(outcomes, device="none")
    assert all(word in page for word in ("# The first hour", "seen", "also", "whole", "| Two? |"))


def test_a_step_that_hangs_ends_with_its_children(first_hour) -> None:  # type: ignore[no-untyped-def]
    """A child keeps the output open: a step whose child lived on would end after ten minutes."""
    code = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print(child.pid, flush=True); time.sleep(600)"
    )
    [outcome] = first_hour.perform([first_hour.Step("Ends?", ("-c", code), 0, 0.1)])
    assert outcome.ended == "ended after 0.1 minutes"
    child = Path(f"/proc/{int(outcome.output)}/stat")
    # A killed process closes its output a moment before it counts as dead.
    wait_for(lambda: not child.exists() or child.read_text().split()[2] == "Z", seconds=300)


def test_the_page_states_every_condition(first_hour, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    outcome = first_hour.Outcome(first_hour.STEPS[0], "ok", 1.0, "seen")
    first_hour.write(tmp_path, [outcome], device="1 x a GPU")
    [file] = tmp_path.iterdir()
    # Its commit may have changes here, or be none.
    assert [problem for problem in check_results.problems(file) if "commit" not in problem] == []


def test_every_step_names_a_command_that_is_there(first_hour) -> None:  # type: ignore[no-untyped-def]
    for step in first_hour.STEPS:
        if step.command[0] != "-m":
            text = (ROOT / step.command[0]).read_text()
            assert all(f'"{word}"' in text for word in step.command if word.startswith("--"))
    assert [step.begins for step in first_hour.STEPS] == sorted(step.begins for step in first_hour.STEPS)


def test_without_a_gpu_it_says_so(first_hour, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert first_hour.main([]) == 2
    assert "finds no GPU" in capsys.readouterr().err
    assert first_hour.main(["--list", "--minutes", "5"]) == 0
    assert "doctor" in capsys.readouterr().out
