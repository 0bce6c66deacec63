"""Student's t and the intervals against SciPy's."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from asyncpp_cli.report.analysis.statistics import (
    CONFIDENCE,
    Interval,
    paired,
    spread,
    t_probability,
    t_quantile,
    welch,
)

LOSSES = st.lists(st.floats(1.0, 5.0), min_size=2, max_size=6, unique=True)


@pytest.mark.parametrize("df", [0.5, 1, 1.3, 2, 3, 4.7, 10, 30.2, 100, 1e4])
def test_quantiles_are_those_of_scipy(df: float) -> None:
    for probability in (0.6, 0.9, 0.95, 0.975, 0.995, 0.9995):
        # SciPy's own quantile is good to about 1e-11.
        assert t_quantile(probability, df) == pytest.approx(stats.t.ppf(probability, df), rel=1e-10)


@given(st.floats(-50, 50), st.floats(0.5, 1e4))
def test_probabilities_are_those_of_scipy(t: float, df: float) -> None:
    assert t_probability(t, df) == pytest.approx(stats.t.cdf(t, df), rel=1e-10, abs=1e-15)


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0, math.nan])
def test_quantiles_are_asked_for_above_one_half(probability: float) -> None:
    with pytest.raises(ValueError, match="between"):
        t_quantile(probability, 3)


# Of losses that are equal but for rounding, scipy warns; the interval is as narrow as the rounding then.
@pytest.mark.filterwarnings("ignore:Precision loss:RuntimeWarning")
@given(LOSSES, LOSSES)
@pytest.mark.slow
def test_the_interval_of_a_difference_is_scipys(one: list[float], other: list[float]) -> None:
    found = welch(spread(one), spread(other))
    expected = stats.ttest_ind(one, other, equal_var=False).confidence_interval(CONFIDENCE)
    near = 1e-8 * (expected.high - expected.low) + 1e-12
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=near)


@given(st.lists(st.tuples(st.floats(1.0, 5.0), st.floats(1.0, 5.0)), min_size=2, max_size=6))
def test_the_interval_of_paired_differences_is_scipys(pairs: list[tuple[float, float]]) -> None:
    differences = [one - other for one, other in pairs]
    found = paired(differences)
    error = stats.sem(differences)
    middle = sum(differences) / len(differences)
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, len(pairs) - 1) * error
    assert (found.low, found.high) == pytest.approx((middle - reach, middle + reach), rel=1e-9, abs=1e-9)


def test_one_run_or_a_diverged_one_has_no_interval_and_equal_runs_one_without_width() -> None:
    three, one, bad = spread([1.0, 2.0, 3.0]), spread([1.0]), spread([1.0, math.nan])
    assert [welch(three, one), welch(one, three), welch(three, bad)] == [None] * 3
    assert [paired([0.5]), paired([0.5, math.inf])] == [None] * 2
    found = welch(spread([2.0, 2.0]), spread([1.5, 1.5]))
    assert (found.low, found.high) == (0.5, 0.5)


@given(st.floats(1e-9, 1e12), st.floats(0, 800))
@example(500.0, 0.0)
def test_a_number_is_inside_its_interval_of_factors(number: float, half_width: float) -> None:
    """The exponential of the logarithm of 500 is below 500, and so was the end of an error bar."""
    found = Interval(low=-half_width, high=half_width).as_factors(number)
    assert found.low <= number <= found.high
    if 0 < half_width < 300:
        assert math.log(found.high / number) == pytest.approx(half_width, abs=1e-9)
