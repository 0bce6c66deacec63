from __future__ import annotations

import math
from itertools import pairwise

import pytest

from stages.config import OptimizerConfig
from stages.update import learning_rate_factor


def test_the_learning_rate_rises_linearly_then_follows_a_cosine() -> None:
    config = OptimizerConfig(name="adamw", warmup=0.1, final_lr=0.1)
    factors = [learning_rate_factor(config, step=step, steps=100) for step in range(101)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[10] == 1.0
    assert factors[55] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert factors[100] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in pairwise(factors[10:]))


def test_a_run_of_one_step_has_its_peak_rate() -> None:
    assert learning_rate_factor(OptimizerConfig(name="adamw"), step=0, steps=1) == 1.0
