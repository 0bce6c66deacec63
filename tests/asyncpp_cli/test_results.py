"""Pages of benchmarks/results: the rule, the checker, and the pages that `report` writes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support.command_line import asyncpp
from support.folder_contents import contents
from support.report_experiment import ExperimentFolder, metrics, settings

from asyncpp_cli.runs.status import State, Status
from benchmarks import check_results

GOOD = """---
date: 2026-12-01
hardware: 8 x H100
versions: torch 2.13.0, Python 3.11.7
commit: 4f7571b822c8
command: asyncpp sweep good-2026-12-01.yaml --out e && asyncpp launch e
seeds: [0, 1]
data: [good-2026-12-01.csv]
---

# Good
"""


@pytest.mark.parametrize("file", check_results.pages(check_results.RESULTS), ids=lambda file: file.stem)
def test_every_page_follows_the_rule(file: Path) -> None:
    assert check_results.problems(file) == []


def test_the_index_is_current() -> None:
    text = (check_results.RESULTS / check_results.INDEX).read_text(encoding="utf-8")
    table = check_results.index_table(check_results.RESULTS)
    assert text == check_results.with_index(text, table), "run: python benchmarks/check_results.py --write"


def found(folder: Path, text: str, name: str = "good-2026-12-01.md") -> list[str]:
    (folder / "good-2026-12-01.csv").write_text("a\n")
    (folder / name).write_text(text)
    return check_results.problems(folder / name)


def test_a_page_with_all_conditions_is_accepted(tmp_path: Path) -> None:
    assert found(tmp_path, GOOD) == []


@pytest.mark.parametrize("field", check_results.FIELDS)
def test_a_page_without_a_condition_is_refused(tmp_path: Path, field: str) -> None:
    lines = [line for line in GOOD.splitlines() if not line.startswith(f"{field}:")]
    assert any(f": {field}: missing" in problem for problem in found(tmp_path, "\n".join(lines)))
    empty = "\n".join(f"{field}:" if line.startswith(f"{field}:") else line for line in GOOD.splitlines())
    assert any(f": {field}: missing" in problem for problem in found(tmp_path, empty))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hardware: 8 x H100", "hardware: not recorded", "in pages before 2026-11-23 only"),
        ("commit: 4f7571b822c8", "commit: 4f7571b822c8-dirty", "measure with committed code"),
        ("commit: 4f7571b822c8", "commit: main", "is not a commit"),
        ("date: 2026-12-01", "date: 2026-12-02", "is not that of its name"),
        ("[good-2026-12-01.csv]", "[other.csv]", "other.csv is not in its folder"),
        ("seeds: [0, 1]", "seeds: [0, 1]\nmood: good", "mood: unknown field"),
        ("seeds: [0, 1]", "seeds: [0", "not YAML"),
        ("---\ndate", "date", "does not begin with its conditions"),
        ("# Good", "Good", "has no heading"),
    ],
)
def test_a_page_with_a_fault_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert any(message in problem for problem in found(tmp_path, GOOD.replace(old, new, 1)))


def test_a_page_is_named_by_its_date(tmp_path: Path) -> None:
    assert found(tmp_path, GOOD, name="good.md") == ["good.md: accepted as a name: NAME-YYYY-MM-DD.md"]


def experiment(folder: Path, *, commits: tuple[str | None, ...] = ("4f7571b822c8",)) -> Path:
    made = ExperimentFolder(folder / "e")
    for seed in range(2):
        for schedule in ("1f1b", "2bw"):
            first, *others = metrics(val_losses=(4.0, 3.0 + seed / 10))
            first |= {"commit": commits[seed % len(commits)], "asyncpp": "0.1.0"}
            made.add(settings(schedule, "muon", seed=seed), rows=[first, *others])
    (made.folder / "template.yaml").write_text("name: trial\n")
    return made.folder


def submitted(folder: Path, out: Path, *options: str) -> tuple[int, str]:
    ended = asyncpp("report", folder, "--format", "submission", "--out", out, *options)
    return ended.code, ended.errors


def test_report_writes_a_page_that_is_accepted(tmp_path: Path) -> None:
    folder = experiment(tmp_path)
    out = tmp_path / "trial-2026-12-01.md"
    assert submitted(folder, out, "--hardware", "2 cores: x86")[0] == 0
    assert check_results.problems(out) == []
    conditions = check_results.conditions_of(out.read_text())
    assert conditions["seeds"] == [0, 1]
    assert conditions["hardware"] == "2 cores: x86"
    assert conditions["versions"] == "torch 2.13.0, Python 3.11.9"
    rows = list(csv.DictReader(out.with_suffix(".csv").read_text().splitlines()))
    assert [float(row["val_loss"]) for row in rows] == [pytest.approx(3.05)] * 2
    assert out.with_suffix(".yaml").read_text() == "name: trial\n"
    assert submitted(folder, out, "--hardware", "2 cores: x86")[0] == 0  # replaces its own page


@pytest.mark.parametrize(
    ("commits", "name", "options", "message"),
    [
        (("4f7571b822c8",), "trial-2026-12-01.md", (), "--hardware TEXT is missing"),
        (("4f7571b822c8-dirty",), "trial-2026-12-01.md", ("--hardware", "x"), "measure with committed code"),
        ((None,), "trial-2026-12-01.md", ("--hardware", "x"), "did not record it"),
        (("4f7571b", "1f7571b"), "trial-2026-12-01.md", ("--hardware", "x"), "differ in it"),
        (("4f7571b",), "trial.md", ("--hardware", "x"), "NAME-YYYY-MM-DD.md"),
        (("4f7571b",), "trial-2026-12-01.md", ("--hardware", "x", "--watch"), "--watch"),
    ],
)
def test_a_submission_that_lacks_a_condition_writes_nothing(
    tmp_path: Path, commits: tuple[str | None, ...], name: str, options: tuple[str, ...], message: str
) -> None:
    folder = experiment(tmp_path, commits=commits)
    before = contents(tmp_path)
    code, errors = submitted(folder, tmp_path / name, *options)
    assert (code, errors.count("\n")) == (2, 1)
    assert message in errors
    assert contents(tmp_path) == before


def test_files_of_others_and_runs_that_are_not_completed_are_left_alone(tmp_path: Path) -> None:
    folder = experiment(tmp_path)
    out = tmp_path / "trial-2026-12-01.md"
    out.with_suffix(".csv").write_text("mine")
    assert "exists already" in submitted(folder, out, "--hardware", "x")[1]
    assert out.with_suffix(".csv").read_text() == "mine"
    made = ExperimentFolder(tmp_path / "unfinished")
    made.add(settings("1f1b", "muon"), status=Status(state=State.FAILED, attempt=1, step=2, steps=4))
    assert "completed runs only" in submitted(made.folder, tmp_path / "other-2026-12-01.md")[1]
