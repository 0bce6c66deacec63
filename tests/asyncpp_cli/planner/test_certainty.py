"""What a plan says of how sure it is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.certainty import WITHIN, likely_ratio
from asyncpp_cli.planner.costs.devices import DEVICES
from asyncpp_cli.planner.costs.roofline import Roofline
from asyncpp_cli.planner.estimate import Estimate, estimate
from asyncpp_cli.planner.fsdp import Sharded, best_sharded
from asyncpp_cli.planner.layouts import Variant, layout
from asyncpp_cli.planner.listing import Listing
from asyncpp_cli.planner.tables import Order, sentences
from stages.config.run_config import changed

BASE = base_of("135m", [])
COSTS = Roofline(DEVICES["h100"])


def pipeline(schedule: str, microbatches: int, *, context: int = 1024) -> Estimate:
    config = changed(BASE.config, {"data.context": context})
    sizes = {"stages": 4, "data": 1, "microbatches": microbatches, "size": 1, "recompute": "none"}
    return estimate(layout(config, Variant(schedule), **sizes), COSTS, limit_gb=None)


def fsdp(context: int) -> Sharded:
    config = changed(BASE.config, {"data.context": context})
    settings = {"gpus": 4, "tokens_per_step": 16 * context, "limit_gb": 75.0}
    return best_sharded(config, costs=COSTS, **settings)[0]


@pytest.mark.parametrize("kind", ["schedules", "fsdp", "long context"])
def test_an_interval_is_as_wide_as_errors_of_its_kind(kind: str) -> None:
    other = pipeline("2bw", 16)
    long = 8192 if kind == "long context" else 1024
    synchronous = pipeline("1f1b", 16) if kind == "schedules" else fsdp(long)
    low, high = likely_ratio(synchronous, other)
    ratio = synchronous.step.seconds / other.step.seconds
    assert low * high == pytest.approx(ratio**2)
    assert math.log(high / low) == pytest.approx(2 * WITHIN[kind])


@pytest.mark.parametrize(("microbatches", "tells"), [(4, True), (256, False)])
def test_the_sentence_says_where_the_plan_cannot_tell(microbatches: int, tells: bool) -> None:
    """With many micro-batches a pipeline that never flushes gains less than the planner is sure of."""
    synchronous, late = pipeline("1f1b", microbatches), pipeline("2bw", microbatches)
    found = Listing(
        pipelines=[late, synchronous],
        further=0,
        alike=0,
        best={"synchronous": synchronous, "delay 1": late},
        sharded=[replace(fsdp(1024), seconds=2 * synchronous.step.seconds)],
    )
    order = Order(base=BASE, gpus=4, costs=COSTS, limit_gb=75.0, times_known=True)
    said = " ".join(sentences(found, order, tokens=2**14))
    assert "more steps (published runs say " in said
    assert ("The plan cannot tell whether it is faster: measure both" in said) != tells
    assert ("training tells" in said) == tells
    # Of so few micro-batches' time FSDP computes for the most part.
    assert ("exchanges (fewer GPUs may be as fast: --map)" in said) == (microbatches == 256)
