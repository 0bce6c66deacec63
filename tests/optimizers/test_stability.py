"""The stability limits: the published table, the roots themselves, and the real optimizers on the
quadratic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.polynomial import polynomial
from support.optimizer_references import error_feedback

from optimizers.build import build_optimizer
from optimizers.stability import FORMS, best_coefficient, characteristic, stability_limit

TABLE = [
    ("none", 0.0, "2", "1", "0.62"),
    ("ema", 0.9, "38", "1.00", "2.70"),
    ("ema", 0.95, "78", "1.00", "4.00"),
    ("nesterov-ema", 0.9, "13.6", "2.53", "3.45"),
    ("nesterov-ema", 0.95, "26.9", "3.75", "6.78"),
    ("nesterov-ema", 0.99, "134", "9.1", "33"),
]
"""Form, beta; limits of synchronous training, delay 1, delay 1 with error feedback of c = 1, to the digits
known."""

BEST = [
    ("none", 0.0, 0.0, 0.0, 1.0),
    ("ema", 0.9, 1.4, 1.6, 3.0),
    ("ema", 0.95, 1.5, 2.0, 5.4),
    ("nesterov-ema", 0.9, 0.4, 0.6, 3.8),
    ("nesterov-ema", 0.95, 0.5, 0.75, 7.3),
    ("nesterov-ema", 0.99, 0.4, 0.75, 35.0),
]
"""Form, beta; where the best coefficient lies at delay 1, and a limit that it reaches."""


@pytest.mark.parametrize(("form", "beta", "sync", "delayed", "corrected"), TABLE)
def test_the_known_table(form: str, beta: float, sync: str, delayed: str, corrected: str) -> None:
    for known, (delay, coefficient) in zip(
        (sync, delayed, corrected), ((0, 0.0), (1, 0.0), (1, 1.0)), strict=True
    ):
        limit = stability_limit(form, beta=beta, delay=delay, coefficient=coefficient)
        digits = len(known.partition(".")[2])
        assert f"{limit:.{digits}f}" == known


@pytest.mark.parametrize(("form", "beta", "low", "high", "reached"), BEST)
def test_the_best_coefficient(form: str, beta: float, low: float, high: float, reached: float) -> None:
    coefficient, limit = best_coefficient(form, beta=beta, delay=1)
    assert low <= coefficient <= high
    assert limit >= reached - 1e-12


@given(beta=st.floats(0.0, 0.999))
def test_without_look_ahead_delay_one_leaves_a_limit_of_one(beta: float) -> None:
    """z^2 - (1 + beta) z + beta + a (1 - beta): the product of the roots reaches 1 at a = 1, whatever
    beta."""
    assert stability_limit("ema", beta=beta, delay=1, coefficient=0.0) == pytest.approx(1.0, abs=1e-9)
    sync = stability_limit("ema", beta=beta, delay=0, coefficient=0.0)
    assert sync == pytest.approx(2 * (1 + beta) / (1 - beta), rel=1e-9)


@given(
    form=st.sampled_from(FORMS),
    beta=st.floats(0.0, 0.99),
    delay=st.integers(0, 16),
    coefficient=st.floats(0.0, 2.0),
)
def test_a_root_leaves_the_unit_circle_at_the_limit(
    form: str, beta: float, delay: int, coefficient: float
) -> None:
    limit = stability_limit(form, beta=beta, delay=delay, coefficient=coefficient)
    fixed, scaled = characteristic(form, beta=beta, delay=delay, coefficient=coefficient)
    below, above = (
        np.abs(polynomial.polyroots(polynomial.polyadd(fixed, factor * limit * scaled))).max()
        for factor in (0.99, 1.01)
    )
    assert below < 1 < above


def last_over_first(form: str, beta: float, delay: int, coefficient: float, step: float) -> float:
    """How much the real optimizer and correction grow or shrink w on f = w^2 / 2, from the middle to the
    end."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = build_optimizer(
        {"blocks.0.norm.weight": weight},
        name="sgd",
        lr=step,
        weight_decay=0.0,
        options={"momentum": 0.0 if form == "none" else beta, "nesterov": form == "nesterov-ema"},
    )
    correction = error_feedback(coefficient)
    replica = torch.ones(1, dtype=torch.float64)
    computed_with = [replica.clone()] * (delay + 1)
    sizes = []
    for _ in range(3000):
        weight.grad = computed_with[-1 - delay].clone()
        correction.update(optimizer=optimizer, master=[weight], replica=[replica])
        computed_with.append(replica.clone())
        sizes.append(float(replica.abs()))
    return max(sizes[-50:]) / max(sizes[1000:1050])


@pytest.mark.parametrize(("form", "beta"), [("none", 0.0), ("ema", 0.9), ("nesterov-ema", 0.95)])
@pytest.mark.parametrize(("delay", "coefficient"), [(1, 0.0), (3, 0.5)])
@pytest.mark.slow
def test_the_real_optimizer_is_stable_up_to_the_limit(
    form: str, beta: float, delay: int, coefficient: float
) -> None:
    limit = stability_limit(form, beta=beta, delay=delay, coefficient=coefficient)
    assert last_over_first(form, beta, delay, coefficient, 0.98 * limit) < 0.5
    assert last_over_first(form, beta, delay, coefficient, 1.02 * limit) > 2


@pytest.mark.parametrize(
    ("form", "changes"),
    [("nesterov", {}), ("ema", {"beta": 1.0}), ("ema", {"delay": -1}), ("ema", {"coefficient": -0.5})],
)
def test_bad_arguments_are_named(form: str, changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="accepted: "):
        stability_limit(form, **{"beta": 0.9, "delay": 1, "coefficient": 0.0, **changes})
