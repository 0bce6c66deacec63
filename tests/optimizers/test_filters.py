"""Momentum as a filter: limit, noise, lag, settling and variance against closed forms and simulation."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.results.momentum_filters import Filter, lag, limit, noise, settling, weight_variance
from optimizers.stability import stability_limit

FILTERS = st.builds(
    Filter, beta=st.floats(0.0, 0.98), weight=st.floats(0.0, 1.0), coefficient=st.floats(0.0, 2.5)
)


def iterated(chosen: Filter, *, delay: int, gradients: np.ndarray, curvature: float) -> np.ndarray:
    """y after each update of eta = 1 by the recurrence itself, from y = 1, with noise `gradients`."""
    y, momentum = 1.0, 0.0
    computed_with = [y] * (delay + 1)
    path = np.empty(len(gradients))
    for t, disturbance in enumerate(gradients):
        gradient = curvature * computed_with[-1 - delay] + disturbance
        momentum = chosen.beta * momentum + (1 - chosen.beta) * gradient
        previous, y = y, y - (1 - chosen.weight) * gradient - chosen.weight * momentum
        computed_with = [*computed_with[-delay - 1 :], y + chosen.coefficient * (y - previous)]
        path[t] = y
    return path


def impulse_response(chosen: Filter, *, length: int = 4000) -> np.ndarray:
    """Updates of the weights that compute after a gradient of 1 and zeros."""
    gradients = np.eye(1, length)[0]
    path = 1 - iterated(Filter(chosen.beta, chosen.weight, 0.0), delay=0, gradients=gradients, curvature=0.0)
    updates = np.diff(path, prepend=0.0)
    return updates + chosen.coefficient * np.diff(updates, prepend=0.0)


@given(beta=st.floats(0.0, 0.99), delay=st.integers(0, 8), coefficient=st.floats(0.0, 2.0))
def test_the_family_holds_the_forms_of_momentum(beta: float, delay: int, coefficient: float) -> None:
    for form, weight in (("ema", 1.0), ("nesterov-ema", beta)):
        expected = stability_limit(form, beta=beta, delay=delay, coefficient=coefficient)
        assert limit(Filter(beta, weight, coefficient), delay=delay) == pytest.approx(expected, rel=1e-9)
    none = stability_limit("none", beta=0.0, delay=delay, coefficient=coefficient)
    assert limit(Filter(beta, 0.0, coefficient), delay=delay) == pytest.approx(none, rel=1e-6)


@given(chosen=FILTERS)
def test_noise_and_lag_are_moments_of_the_impulse_response(chosen: Filter) -> None:
    response = impulse_response(chosen)
    assert response.sum() == pytest.approx(1.0, abs=1e-9)
    assert noise(chosen) == pytest.approx(float(response @ response), rel=1e-9)
    mean_age = float(response @ np.arange(len(response)))
    assert lag(chosen, delay=0) == pytest.approx(mean_age, abs=1e-6)
    assert lag(chosen, delay=3) == pytest.approx(mean_age + 3, abs=1e-6)


@pytest.mark.parametrize(
    ("chosen", "delay", "step"),
    [(Filter(0.9, 1.0, 1.0), 1, 1.0), (Filter(0.95, 0.9, 0.5), 1, 1.5), (Filter(0.8, 0.8, 0.7), 3, 0.4)],
)
def test_the_variance_is_the_sum_of_squares_of_the_loops_response(
    chosen: Filter, delay: int, step: float
) -> None:
    impulse = np.eye(1, 3000)[0]
    disturbed = iterated(chosen, delay=delay, gradients=impulse, curvature=step)
    alone = iterated(chosen, delay=delay, gradients=0 * impulse, curvature=step)
    response = disturbed - alone
    assert weight_variance(chosen, delay=delay, step=step) == pytest.approx(
        2 * step * float(response @ response)
    )


@pytest.mark.parametrize(
    ("chosen", "delay", "step"),
    [
        (Filter(0.9, 1.0, 0.0), 1, 0.01),
        (Filter(0.975, 0.55, 0.0), 1, 0.01),
        (Filter(0.95, 0.95, 0.5), 1, 2.0),
    ],
)
def test_the_iteration_settles_in_as_many_updates(chosen: Filter, delay: int, step: float) -> None:
    """The largest of |y| over windows, which hold whole periods of an oscillation, falls so fast."""
    path = np.abs(iterated(chosen, delay=delay, gradients=np.zeros(1200), curvature=step))
    first, last = path[200:700].max(), path[700:1200].max()
    assert settling(chosen, delay=delay, step=step) == pytest.approx(500 / math.log(first / last), rel=0.02)


@pytest.mark.parametrize("delay", range(9))
def test_descent_without_momentum_has_closed_forms(delay: int) -> None:
    """A root e^(i theta) of z^(d+1) - z^d + a needs theta = pi / (2 d + 1), and a = 2 sin(theta / 2). Without
    delay y' = (1 - a) y - e has variance 1 / (1 - (1 - a)^2) = 1 / (a (2 - a)), and the unit is 1 / 2 a."""
    descent = Filter(0.0, 0.0, 0.0)
    largest = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
    assert limit(descent, delay=delay) == pytest.approx(largest, rel=1e-9)
    step = 0.1 + 0.2 * delay
    assert weight_variance(descent, delay=0, step=step) == pytest.approx(2 / (2 - step))
    assert settling(descent, delay=0, step=step) == pytest.approx(-1 / math.log(abs(1 - step)))


@given(chosen=FILTERS, delay=st.integers(0, 4))
def test_small_steps_vary_and_settle_whatever_the_filter(chosen: Filter, delay: int) -> None:
    """Up to terms of the step times the lag, at most 55 here."""
    assert weight_variance(chosen, delay=delay, step=1e-6) == pytest.approx(1.0, abs=2e-4)
    assert settling(chosen, delay=delay, step=1e-6) == pytest.approx(1e6, rel=2e-4)


def test_from_the_limit_on_nothing_settles() -> None:
    adamw = Filter(0.9, 1.0, 0.0)
    for step in (1.0, 1.5):
        assert weight_variance(adamw, delay=1, step=step) == settling(adamw, delay=1, step=step) == math.inf
    assert weight_variance(adamw, delay=1, step=0.99) > 50


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: Filter(1.0, 1.0, 0.0), "beta is .*accepted: "),
        (lambda: Filter(0.9, 1.1, 0.0), "weight is .*accepted: "),
        (lambda: Filter(0.9, 1.0, -1.0), "coefficient is .*accepted: "),
        (lambda: settling(Filter(0.9, 1.0, 0.0), delay=1, step=0.0), "step is 0, accepted: above 0"),
        (lambda: limit(Filter(0.9, 1.0, 0.0), delay=-1), "delay is -1, accepted: at least 0"),
    ],
)
def test_bad_filters_are_named(made: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        made()
