"""Faster links and more memory never make the best layout slower, nor do more GPUs that compute."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.costs.devices import DEVICES, Device
from asyncpp_cli.planner.costs.roofline import Roofline
from asyncpp_cli.planner.cuts import WORTH_A_CUT
from asyncpp_cli.planner.listing import Listing, listed
from asyncpp_cli.planner.shared import Shared

NAMES = ("1f1b", "zero-bubble", "2bw")


def planned(model: str, device: Device, *, gpus: int, tokens: int, limit_gb: float) -> Listing:
    base, costs = base_of(model, ["data.context=1024"]).config, Roofline(device)
    asked = {"gpus": gpus, "tokens_per_step": tokens, "limit_gb": limit_gb}
    return listed(base, Shared(costs), names=NAMES, with_sharded=True, **asked)


def fastest(model: str, device: Device, **asked: Any) -> float:
    """Seconds of the best step of FSDP, HSDP and pipelines."""
    return best_of(planned(model, device, **asked))


def best_of(found: Listing) -> float:
    return min((each.step.seconds for each in (*found.best.values(), *found.sharded)), default=inf)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(
    model=st.sampled_from(["135m", "360m"]),
    device=st.sampled_from(["h100", "a100", "rtx4090"]),
    gpus=st.sampled_from([2, 4, 8]),
    sequences=st.sampled_from([1, 4]),
    limit_gb=st.floats(6.0, 20.0),
    network_gbs=st.floats(2.0, 50.0),
    gpus_per_node=st.sampled_from([1, 4]),
)
def test_more_is_not_slower(
    model: str,
    device: str,
    gpus: int,
    sequences: int,
    limit_gb: float,
    network_gbs: float,
    gpus_per_node: int,
) -> None:
    gpu = replace(DEVICES[device], network_gbs=network_gbs, gpus_per_node=gpus_per_node)
    asked = {"gpus": gpus, "tokens": 2 * gpus * sequences * 1024, "limit_gb": limit_gb}
    seconds = fastest(model, gpu, **asked)
    # A cut is taken for the sake of memory, and left if another is no faster than this.
    most = seconds / (1 - WORTH_A_CUT)
    assert fastest(model, gpu, **asked | {"limit_gb": 1.5 * limit_gb}) <= most
    assert fastest(model, replace(gpu, link_gbs=2 * gpu.link_gbs), **asked) <= most
    assert fastest(model, replace(gpu, network_gbs=2 * network_gbs), **asked) <= most


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    model=st.sampled_from(["135m", "360m"]),
    device=st.sampled_from(["h100", "a100", "rtx4090"]),
    gpus=st.sampled_from([1, 2, 4]),
    sequences=st.sampled_from([1, 2, 4]),
    limit_gb=st.floats(6.0, 20.0),
    network_gbs=st.floats(1.0, 50.0),
    gpus_per_node=st.sampled_from([1, 2, 4, 8]),
)
def test_twice_the_gpus_are_not_slower_where_fsdp_computes_half_of_the_time(
    model: str,
    device: str,
    gpus: int,
    sequences: int,
    limit_gb: float,
    network_gbs: float,
    gpus_per_node: int,
) -> None:
    """Each computes half as much, so a step that loses less than half to its exchanges takes no longer than
    one of fewer GPUs that loses nothing."""
    gpu = replace(DEVICES[device], network_gbs=network_gbs, gpus_per_node=gpus_per_node)
    asked = {"tokens": 2 * gpus * sequences * 1024, "limit_gb": limit_gb}
    more = planned(model, gpu, gpus=2 * gpus, **asked)
    assume(more.sharded and more.sharded[0].lost < 0.5)
    assert best_of(more) <= fastest(model, gpu, gpus=gpus, **asked) / (1 - WORTH_A_CUT)


def test_more_gpus_are_slower_where_fsdp_only_exchanges() -> None:
    gpu = replace(DEVICES["h100"], network_gbs=0.1, gpus_per_node=1)
    asked = {"tokens": 4 * 1024, "limit_gb": 20.0}
    more = planned("135m", gpu, gpus=4, **asked)
    assert more.sharded[0].lost > 0.95
    assert best_of(more) > 1.5 * fastest("135m", gpu, gpus=2, **asked)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(device=st.sampled_from(["h100", "rtx4090"]), network_gbs=st.floats(0.5, 4.0))
def test_a_faster_network_is_faster_between_nodes_of_one_gpu(device: str, network_gbs: float) -> None:
    """All that is synchronous waits for it; a delay may hide all messages."""
    gpu = replace(DEVICES[device], network_gbs=network_gbs, gpus_per_node=1)
    asked = {"gpus": 4, "tokens": 4 * 4 * 1024, "limit_gb": 20.0}
    slow, fast = (
        planned("135m", replace(gpu, network_gbs=factor * network_gbs), **asked) for factor in (1, 2)
    )
    for before, after in (
        (slow.best["synchronous"].step.seconds, fast.best["synchronous"].step.seconds),
        (slow.sharded[0].seconds, fast.sharded[0].seconds),
    ):
        assert after < before
    assert best_of(fast) <= best_of(slow) / (1 - WORTH_A_CUT)
