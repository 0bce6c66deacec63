"""The first line of a report, its failures in groups, and differences between any two arms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from support.command_line import refusal, succeeded
from support.report_experiment import ExperimentFolder, metrics, quickstart_folder, run, settings

from asyncpp import Experiment
from asyncpp_cli.report.analysis.aggregate import aggregate
from asyncpp_cli.report.analysis.answer import answer
from asyncpp_cli.report.analysis.failures import failures
from asyncpp_cli.report.load.run import RunResult
from asyncpp_cli.report.tables.document import Report
from asyncpp_cli.runs.attempts.cost import Cost
from asyncpp_cli.runs.status import Cause, State, Status


def arm(schedule: str, *losses: float | None, **further: Any) -> list[RunResult]:
    return [run(schedule, loss=loss, seed=seed, **further) for seed, loss in enumerate(losses)]


def sentence(*runs: RunResult) -> str | None:
    found = answer(aggregate(runs)[0])
    return None if found is None else found.sentence


def test_the_first_line_names_the_best_arm_the_next_and_what_it_cost() -> None:
    runs = [*arm("1f1b", 2.00, 2.02), *arm("2bw", 2.01, 2.05), *arm("2bw", 2.5, 2.6, error_feedback=1.0)]
    costly = [replace(each, cost=Cost(gpu_hours=0.0, core_hours=2.0)) for each in runs]
    low, high = stats.t.interval(0.95, 1, 2.01, stats.sem([2.00, 2.02]))
    least, most = stats.t.interval(0.95, 1, 0.02, stats.sem([0.01, 0.03]))
    assert sentence(*costly) == (
        f"Best: 1f1b muon, 2.010 ({low:.3f} to {high:.3f}); 2bw muon +0.020 ({least:+.3f} to {most:+.3f}): "
        "undecided; cost 12 core-hours."
    )
    # One seed has no interval; an arm that is clearly worse is not undecided.
    assert sentence(*arm("1f1b", 2.0), *arm("2bw", 2.1)) == (
        "Best: 1f1b muon, 2.000 (one seed); 2bw muon +0.100 (one seed)."
    )
    assert "undecided" not in str(sentence(*arm("1f1b", 2.0, 2.1), *arm("2bw", 2.5, 2.6)))
    assert sentence(*arm("1f1b", None), *arm("2bw", float("nan"))) is None


def test_synchronous_schedules_are_one_arm_and_short_runs_have_no_loss() -> None:
    gpipe = arm("gpipe", 2.0)
    assert "gpipe" not in str(sentence(*arm("1f1b", 2.0), *gpipe, *arm("2bw", 2.1)))
    timed = [replace(each, loss_of="1f1b-0") for each in arm("zero-bubble", 1.0)]
    assert str(sentence(*arm("1f1b", 2.0), *timed)).startswith("Best: 1f1b muon")


def test_arms_that_are_not_like_with_like_and_a_busy_machine_are_named() -> None:
    base = arm("1f1b", 2.0, 2.1)
    longer = arm("2bw", 2.2, 2.3, **{"train.steps": 8})
    said = str(sentence(*base, *longer, *arm("2bw", 2.4)))
    assert "2bw muon steps 8 (8 steps, not 4)" in said
    assert "(seeds: 1 in one of both alone)" in said
    three = [
        each for name in ("2bw", "paci", "pipedream") for each in arm(name, 2.2, 2.3, **{"train.steps": 8})
    ]
    together = "2bw muon, paci muon and 1 more (8 steps, not 4)"
    assert f"not like with like: {together}" in str(sentence(*base, *three))
    more = arm("pipedream", 2.2, 2.3)
    assert "not like with like: pipedream muon (2 updates per step)" in str(sentence(*base, *more))
    loaded = [replace(each, load_per_core=3.0) for each in base]
    assert str(sentence(*loaded)).endswith(" The machine was busy: do not trust the speeds.")
    assert "busy" not in str(sentence(*base))


def test_every_format_begins_with_it_and_marks_the_best_row(tmp_path: Path) -> None:
    folder = quickstart_folder(tmp_path / "e").folder
    said = "Best: 1f1b muon, 2.067 (1.984 to 2.149); 2bw muon EF +0.020 (+0.020 to +0.020)."
    table = succeeded("report", folder).output.splitlines()
    assert table[:2] == ["quickstart", said]
    assert [line.split()[:3] for line in table if " * " in line] == [["1f1b", "*", "muon"]]
    markdown = succeeded("report", folder, "--format", "markdown").output.splitlines()
    assert markdown[2].startswith(f"**{said[:18]}")
    assert sum(r"1f1b \* |" in line for line in markdown) == 1
    latex = succeeded("report", folder, "--format", "latex").output
    assert f"% {said[:20]}" in latex
    cells = json.loads(succeeded("report", folder, "--format", "json").output)
    [best] = [cell for cell in cells if cell["best"]]
    assert (best["schedule"], best["optimizer"]) == ("1f1b", "muon")
    assert best["answer"] == said
    assert [cell["answer"] for cell in cells if not cell["best"]] == [None] * 5
    succeeded("report", folder, "--format", "html", "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f'<p class="answer">{said}' in page
    assert f"<p>{said}" in Experiment(folder)._repr_html_()


def test_rows_are_ordered_by_loss_on_demand(tmp_path: Path) -> None:
    folder = quickstart_folder(tmp_path / "e").folder
    cells = json.loads(succeeded("report", folder, "--format", "json", "--sort").output)
    losses = [cell["val_loss"] for cell in cells]
    assert losses == sorted(losses)
    assert [cell["best"] for cell in cells] == [True, *[False] * 5]


def test_runs_with_one_reason_are_told_once_with_their_ids_folded(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "e")
    experiment.add(settings("1f1b", "muon"), axes={"optimizer.lr": 0.1})
    rate = {"optimizer.lr": 300.0}
    for seed, begins in enumerate((3, 3, 2)):
        rows = [
            row | {"skipped": True} if row["kind"] == "step" and row["step"] >= begins else row
            for row in metrics()[:-2]
        ]
        reason = f"rank 0: SkippedTooOftenError: not finite in 2 updates in a row, up to update {4 + seed}"
        status = Status(state=State.FAILED, attempt=1, step=2, steps=4, reason=reason, cause=Cause.ERROR)
        experiment.add(settings("2bw", "muon", seed=seed, **rate), rows=rows, status=status, axes=rate)
    lost = Status(state=State.FAILED, attempt=1, step=2, steps=4, reason="out of memory", cause=Cause.ERROR)
    experiment.add(settings("2bw", "soap", **rate), rows=metrics()[:3], status=lost, axes=rate)
    text = " ".join(succeeded("report", experiment.folder).output.split())
    assert (
        "! 3 runs (2bw, muon, lr 300): the gradient was not finite from update 2 on; lower optimizer.lr "
        "(run-1, run-2 and 1 more)"
    ) in text.replace("2bw, lr", "2bw, muon, lr")
    assert "failed: out of memory (run-4)" in text
    succeeded("report", experiment.folder, "--format", "html", "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<li>run-1</li><li>run-2</li><li>run-3</li>" in page


def test_reasons_that_differ_in_more_than_numbers_are_not_one_group() -> None:
    runs = [
        replace(run("2bw", seed=seed, loss=None, state="failed"), reason=reason, id=f"r{seed}")
        for seed, reason in enumerate(("rank 0: killed", "rank 1: killed", "rank 1: out of memory"))
    ]
    found = failures(aggregate(runs)[0])
    assert [each.ids for each in found] == [("r0", "r1"), ("r2",)]
    assert found[0].line == "2 runs: failed: rank 0: killed (r0, r1)"


LOSSES = {"1f1b": (2.0, 2.03, 1.98), "2bw": (2.1, 2.16, 2.07), "paci": (2.3, 2.2)}


@pytest.fixture
def arms(tmp_path: Path) -> Path:
    experiment = ExperimentFolder(tmp_path / "e")
    for schedule, losses in LOSSES.items():
        for seed, loss in enumerate(losses):
            rows = metrics(val_losses=(4.0, loss), delay=int(schedule == "2bw"))
            experiment.add(settings(schedule, "muon", seed=seed), rows=rows, run_id=f"{schedule}-{seed}")
    return experiment.folder


def test_any_two_arms_are_compared_over_their_common_seeds(arms: Path) -> None:
    cells = json.loads(succeeded("report", arms, "--format", "json", "--against", "2bw").output)
    by_schedule = {cell["schedule"]: cell for cell in cells}
    assert by_schedule["2bw"]["against"] is None
    assert {cell["reference"] for cell in cells} == {"2bw muon"}
    for schedule, count in (("1f1b", 3), ("paci", 2)):
        differences = [a - b for a, b in zip(LOSSES[schedule], LOSSES["2bw"], strict=False)]
        mean = sum(differences) / count
        low, high = stats.t.interval(0.95, count - 1, mean, stats.sem(differences))
        cell = by_schedule[schedule]
        assert (cell["against"], cell["against_low"], cell["against_high"]) == pytest.approx(
            (mean, low, high)
        )
    table = succeeded("report", arms, "--against", "muon 2bw").output
    assert "minus" in table
    assert "reference" in table
    assert "several arms have these words; accepted: 1f1b muon; 2bw muon; paci muon" in refusal(
        "report", arms, "--against", "muon"
    )
    assert "no arm has these words" in refusal("report", arms, "--against", "gpipe")


def test_diff_has_the_paired_difference_with_its_interval(arms: Path) -> None:
    found = json.loads(succeeded("diff", arms / "2bw", arms / "paci", "--json").output)
    [losses] = found["losses"]
    differences = [0.2, 0.04]
    low, high = stats.t.interval(0.95, 1, 0.12, stats.sem(differences))
    assert (losses["difference"], losses["low"], losses["high"]) == pytest.approx((0.12, low, high))
    assert losses["seeds"] == [0, 1]
    assert (
        f"+0.120 ({low:+.3f} to {high:+.3f}): undecided"
        in succeeded("diff", arms / "2bw", arms / "paci").output
    )


def test_a_report_without_a_loss_has_no_first_line() -> None:
    report = Report(name="x", cells=aggregate(arm("1f1b", None))[0], notes=[])
    assert (report.answer, report.first_line) == (None, [])
