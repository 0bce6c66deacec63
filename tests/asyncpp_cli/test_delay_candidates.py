"""benchmarks/delay_candidates.py: arms, their gaps to synchronous AdamW and the theory beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.launches import TINY

import asyncpp
from asyncpp_cli.report.formats.records import csv_text
from asyncpp_cli.runs.experiment_folder import open_experiment
from benchmarks.delay_candidates import Arm, arm_of, filter_of, page, read, rows
from optimizers.theory.filters import Filter

AXES = ["schedule", "optimizer", "error_feedback", "model", "seed", "optimizer.lr", "optimizer.beta1"]
RUN = {"steps": 300, "error_feedback": 0.0, "model": "micro", "seed": 0, "optimizer.lr": 0.004}
SYNCHRONOUS = arm_of(
    {**RUN, "schedule": "1f1b", "optimizer": "adamw", "optimizer.beta1": 0.9}, AXES, momentum=None
)
DELAYED = arm_of(
    {**RUN, "schedule": "2bw", "optimizer": "adamw", "optimizer.beta1": 0.9},
    AXES,
    momentum=Filter(0.9, 1.0, 0.0),
)
CORRECTED = arm_of(
    {**RUN, "schedule": "2bw", "optimizer": "adamw", "optimizer.beta1": None, "error_feedback": 1.0},
    AXES,
    momentum=Filter(0.9, 1.0, 1.0),
)
OTHER = arm_of({**RUN, "schedule": "2bw", "optimizer": "nadamw", "optimizer.beta1": 0.9}, AXES, momentum=None)


def test_an_arm_is_what_its_axes_say() -> None:
    assert DELAYED.name == "2bw, adamw, optimizer.beta1 0.9"
    assert CORRECTED.name == "2bw, adamw, error_feedback 1"
    assert SYNCHRONOUS.is_synchronous("adamw")
    assert not SYNCHRONOUS.is_synchronous("muon")
    assert not DELAYED.is_synchronous("adamw")


def test_the_theory_is_that_of_the_arms_filter() -> None:
    assert DELAYED.theory is not None
    assert f"{DELAYED.theory.limit:.3f}" == "1.000"
    assert CORRECTED.theory is not None
    assert f"{CORRECTED.theory.limit:.3f}" == "2.702"
    assert SYNCHRONOUS.theory is None
    assert OTHER.theory is None


def test_the_filter_has_the_options_that_a_template_fixes(tmp_path: Path) -> None:
    fixed = ("optimizer.beta1=0.95", "optimizer.momentum_weight=0.55")
    matrix = "zip={schedule: [1f1b, 2bw], error_feedback: [false, 0.5], optimizer: [qhadamw, qhadamw]}"
    asyncpp.sweep("quickstart", *TINY, "matrix={seed: 0}", matrix, *fixed, out=tmp_path / "e")
    synchronous, delayed = (filter_of(run.config()) for run in open_experiment(tmp_path / "e").runs)
    assert synchronous is None
    assert delayed == Filter(0.95, 0.55, 0.5)


def test_gaps_pair_the_seeds_of_both_arms_at_their_best_rates() -> None:
    text = page(
        {
            SYNCHRONOUS: {0.004: {0: 2.0, 1: 2.2}, 0.008: {0: 1.9, 1: 2.0}, 0.016: {0: 2.5, 1: 2.5}},
            DELAYED: {0.004: {1: 2.2, 2: 9.0, 0: 2.1}, 0.002: {1: 2.4, 2: 9.0, 0: 2.2}},
        }
    )
    lines = [line for line in text.splitlines() if line.startswith(("| 1f1b", "| 2bw"))]
    rows = sorted([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    assert rows[0][:5] == ["1f1b, adamw", "0.9", "0.008", "1.9500", "+0.0000"]
    assert rows[1][2] == "0.004 (edge)"
    assert rows[1][4:7] == ["+0.2000", "+0.2000 to +0.2000", "2"]
    assert rows[1][7:10] == ["1", "0.0526", "10"]


def test_settings_that_are_not_an_arms_own_are_left_empty_in_its_line() -> None:
    text = page({SYNCHRONOUS: {0.004: {0: 2.0}}, CORRECTED: {0.004: {0: 2.1}}})
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:6]]
    assert head[:4] == ["arm", "beta1", "error_feedback", "best rate"]
    assert [row[:3] for row in rows] == [["1f1b, adamw", "0.9", ""], ["2bw, adamw", "", "1"]]


def test_arms_with_fewer_than_three_seeds_have_a_table_of_their_own() -> None:
    text = page(
        {
            SYNCHRONOUS: {0.004: {0: 2.0, 1: 2.1, 2: 2.2}},
            DELAYED: {0.004: {0: 2.1, 1: 2.2, 2: 2.3}},
            CORRECTED: {0.004: {0: 1.9, 1: 2.0}},
        }
    )
    first, second = text.split("With fewer than 3 seeds:")
    assert (first.count("| 0.004 (edge) |"), second.count("| 0.004 (edge) |")) == (2, 1)
    assert "error_feedback" not in first
    assert "error_feedback" in second


def test_the_raw_numbers_have_a_row_for_each_run() -> None:
    first, *others = rows({CORRECTED: {0.004: {1: 2.5, 0: 2.0}}, SYNCHRONOUS: {0.008: {0: 1.9}}})
    assert first == {
        "steps": 300,
        "schedule": "1f1b",
        "optimizer": "adamw",
        "optimizer.beta1": "0.9",
        "error_feedback": "",
        "optimizer.lr": 0.008,
        "seed": 0,
        "val_loss": 1.9,
    }
    assert [(row["error_feedback"], row["seed"], row["val_loss"]) for row in others] == [
        ("1", 0, 2.0),
        ("1", 1, 2.5),
    ]


def test_a_file_of_raw_numbers_is_read_as_the_experiments_were(tmp_path: Path) -> None:
    predicted = replace(DELAYED, settings=(*DELAYED.settings, ("correction.name", "x")), filter=None)
    losses = {
        CORRECTED: {0.004: {1: 2.5, 0: 2.0}},
        SYNCHRONOUS: {0.008: {0: 1.9}},
        predicted: {0.004: {0: 2.2}},
        OTHER: {0.002: {0: 2.3}},
    }
    of_runs = rows(losses)
    file = tmp_path / "runs.csv"
    file.write_text(csv_text([list(of_runs[0]), *(list(row.values()) for row in of_runs)]))
    again = read([str(file)])
    assert again == losses
    assert {arm: arm.filter for arm in again} == {arm: arm.filter for arm in losses}
    other = tmp_path / "other.csv"
    other.write_text(file.read_text().replace("2.3", "2.4"))
    assert read([str(file), str(file)]) == losses
    with pytest.raises(ValueError, match=r"two runs of 2bw, nadamw, .*, seed 0 at 0.002 have other losses"):
        read([str(file), str(other)])


def test_losses_are_ranked_beside_the_measures_at_the_setting_that_most_filters_have() -> None:
    def momentum(coefficient: float) -> Arm:
        filtered = {"error_feedback": coefficient, "optimizer.beta1": 0.9}
        return arm_of(
            {**RUN, "schedule": "2bw", "optimizer": "adamw", **filtered},
            AXES,
            momentum=Filter(0.9, 1.0, coefficient),
        )

    # Limits of c = 0, 0.5 and 1 rise; in the order of the losses they are 1, 3, 2, a correlation of -0.5.
    losses = {
        momentum(0.0): {0.004: {0: 2.9}, 0.008: {0: 1.0}},
        momentum(1.0): {0.004: {0: 2.8}},
        momentum(0.5): {0.004: {0: 2.7}},
        SYNCHRONOUS: {0.008: {0: 1.0}},
    }
    assert "3 filters at a rate of 0.004, seed 0: limit -0.50, noise -0.50, lag +0.50," in page(losses)
    # At another rate c = 0 has the lowest: 1, 2, 3.
    assert "3 filters each at its best rate, seed 0: limit +1.00, noise +1.00, lag -1.00," in page(losses)
    assert "Rank correlation" not in page({SYNCHRONOUS: {0.008: {0: 1.0}}})
