"""benchmarks/delay_candidates.py: arms, their gaps to synchronous AdamW and the theory beside them."""

from __future__ import annotations

from pathlib import Path

from support.launches import TINY

import asyncpp
from asyncpp_cli.runs.experiment_folder import open_experiment
from benchmarks.delay_candidates import Arm, arm_of, filter_of, page, rows
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
            DELAYED: {0.004: {0: 2.1, 1: 2.2, 2: 9.0}, 0.002: {0: 2.2, 1: 2.4, 2: 9.0}},
        }
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[4:6]]
    assert rows[0][:4] == ["1f1b, adamw, optimizer.beta1 0.9", "0.008", "1.9500", "+0.0000"]
    assert rows[1][1] == "0.004 (edge)"
    assert rows[1][3:6] == ["+0.2000", "+0.2000 to +0.2000", "2"]
    assert rows[1][6:9] == ["1", "0.0526", "10"]


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
    assert "Rank correlation" not in page({SYNCHRONOUS: {0.008: {0: 1.0}}})
