"""The best rate of an arm."""

from __future__ import annotations

import pytest

from benchmarks.results.best_rates import best


def test_the_best_rate_is_chosen_among_those_with_the_most_seeds() -> None:
    chosen = best({1e-3: {0: 1.0}, 2e-3: {0: 2.0, 1: 2.2}, 4e-3: {0: 2.1, 1: 1.9}, 8e-3: {0: 2.5, 1: 2.5}})
    assert chosen.lr == 4e-3
    assert chosen.losses == {0: 2.1, 1: 1.9}


def test_a_best_rate_between_rates_of_one_seed_is_not_on_the_edge() -> None:
    chosen = best({4e-3: {0: 2.0}, 8e-3: {0: 1.0, 1: 1.5, 2: 3.5}, 1.6e-2: {0: 1.2}})
    assert chosen.lr == 8e-3
    assert not chosen.on_edge
    assert chosen.tried == pytest.approx({4e-3: 2.0, 8e-3: 1.0, 1.6e-2: 1.2}), "over the common seed"
    assert best({4e-3: {0: 2.0}, 8e-3: {0: 1.0, 1: 1.0}}).on_edge


def test_rates_without_a_common_seed_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no seed was run at all of the rates 0\.004, 0\.008"):
        best({4e-3: {0: 2.0}, 8e-3: {1: 1.0}})
