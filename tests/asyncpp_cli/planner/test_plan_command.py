"""What `asyncpp plan` says of layouts that it does not list, and of those that it cannot offer."""

from __future__ import annotations

import pytest
from support.command_line import refusal, succeeded
from support.planned import COSTS, layout_of

from asyncpp_cli.planner.estimate import own_estimate
from asyncpp_cli.planner.shared import Shared

FEW = ("--schedule", "1f1b", "--schedule", "2bw")
SMALL = ("plan", "nano", "data.context=128", "--tokens-per-step", "4096")


@pytest.mark.slow
def test_the_sentence_does_not_depend_on_what_is_listed() -> None:
    """A delay of one is named if it is faster, though more delay is faster still and fills the list."""
    words = ("plan", "135m", "data.context=1024", "--gpus", "16", "--tokens-per-step", "65536")
    said = []
    for rows in ("1", "8"):
        found = succeeded(*words, "--rows", rows)
        said.append([line for line in found.errors.splitlines() if "of its step to exchanges" in line])
    assert said[0] == said[1]
    assert "pays if its delay of 1 costs fewer" in said[0][0]


def test_tokens_that_do_not_divide_are_named_with_some_that_would() -> None:
    said = succeeded(*SMALL, "--gpus", "3", "--rows", "1", "model.layers=6").errors
    assert "FSDP: 4,096 tokens per step do not divide into sequences of 128 for 3 GPUs" in said
    assert "--tokens-per-step 3,840 or 4,224 would" in said


def test_what_does_not_fit_is_not_offered_as_settings() -> None:
    words = (*SMALL, *FEW, "--gpus", "2", "--memory", "0.001")
    found = succeeded(*words)
    assert "as settings:" not in found.errors
    assert "It does not fit, so its settings are not shown" in found.errors
    assert "--as-template: no layout of these fits" in refusal(*words, "--as-template", "x.yaml")


@pytest.mark.parametrize(("stages", "data", "crosses"), [(2, 1, False), (8, 1, False), (4, 4, True)])
def test_messages_within_a_node_do_not_depend_on_the_network(stages: int, data: int, crosses: bool) -> None:
    config = layout_of("360m", "1f1b", stages=stages, data=data, microbatches=8)
    slow, fast = (own_estimate(config, Shared(COSTS.over(network_gbs=gbs))).step.seconds for gbs in (0.1, 50))
    assert (slow > 1.5 * fast) == crosses
    assert crosses or slow == fast


@pytest.mark.parametrize(("data", "crosses"), [(2, False), (8, False), (16, True)])
def test_gradients_are_reduced_within_a_node_where_its_ranks_share_one(data: int, crosses: bool) -> None:
    """Process r * data + d performs rank r of pipeline d."""
    config = layout_of("360m", "1f1b", stages=1, data=data, microbatches=1)
    slow, fast = (COSTS.over(network_gbs=gbs).reduction(config, 10**8) for gbs in (0.1, 50))
    assert (slow > fast) == crosses
