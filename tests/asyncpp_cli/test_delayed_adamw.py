"""Delayed AdamW: arms, their gaps to synchronous AdamW, and their theory."""

from __future__ import annotations

from benchmarks.results.delayed_adamw import Arm, page
from optimizers.theory.filters import Filter


def arm(schedule: str, optimizer: str = "adamw", **settings: str) -> Arm:
    keys = {"beta1": "optimizer.beta1", "weight": "optimizer.momentum_weight"}
    of_arm = {"schedule": schedule, "optimizer": optimizer}
    of_arm |= {keys.get(name, name): value for name, value in settings.items()}
    return Arm(steps=300, settings=tuple(of_arm.items()))


SYNCHRONOUS = arm("1f1b", beta1="0.9")
DELAYED = arm("2bw", beta1="0.9")
CORRECTED = arm("2bw", error_feedback="1")


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
    assert arm("2bw", "nadamw", beta1="0.9").theory is None
    own = arm("2bw", "qhadamw", beta1="0.95", weight="0.55", error_feedback="0.5").theory
    assert own is not None
    assert own.filter == Filter(0.95, 0.55, 0.5)


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


def test_losses_are_ranked_beside_the_measures_at_the_setting_that_most_filters_have() -> None:
    # Limits of c = 0, 0.5 and 1 rise; in the order of the losses they are 1, 3, 2, a correlation of -0.5.
    losses = {
        arm("2bw", beta1="0.9", error_feedback="0"): {0.004: {0: 2.9}, 0.008: {0: 1.0}},
        arm("2bw", beta1="0.9", error_feedback="1"): {0.004: {0: 2.8}},
        arm("2bw", beta1="0.9", error_feedback="0.5"): {0.004: {0: 2.7}},
        SYNCHRONOUS: {0.008: {0: 1.0}},
    }
    assert "3 filters at a rate of 0.004, seed 0: limit -0.50, noise -0.50, lag +0.50," in page(losses)
    # At another rate c = 0 has the lowest: 1, 2, 3.
    assert "3 filters each at its best rate, seed 0: limit +1.00, noise +1.00, lag -1.00," in page(losses)
    assert "Rank correlation" not in page({SYNCHRONOUS: {0.008: {0: 1.0}}})
