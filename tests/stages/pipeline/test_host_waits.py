"""No action and no update asks a tensor for its value, but where the verdict on a step is read: on a GPU the
host would wait there until the device has done all that it was given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.small_runs import Operators, ranks_of, small_config
from torch import Tensor

import stages.update.update_phases
from optimizers import NAMES
from stages.comm.collectives import Exchange
from stages.config.run_config import RunConfig
from stages.config.segments import segment_program
from stages.pipeline.build import Rank
from stages.pipeline.executor import drive
from stages.update.update_stream import to_host

TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Of operators whose result, or its shape, the host must see values for."""

ON_THE_HOST = ("step", "momentum_product", "mu_product")
"""What optimizers count with: tensors on the CPU, on a GPU too."""


class ValuesAsked(Operators):
    """Notes which operators ask for values, of tensors that a GPU would have."""

    def __init__(self, ranks: list[Rank]) -> None:
        super().__init__()
        self._ranks = ranks
        self.allowed = False
        self.asked: list[str] = []

    def note(self, operator: Any, given: tuple[Any, ...], out: Any) -> None:
        tensors = [arg for arg in given if isinstance(arg, Tensor)]
        if TAGS & set(operator.tags) and not self.allowed and not all(map(self._on_the_host, tensors)):
            self.asked.append(str(operator))

    def _on_the_host(self, tensor: Tensor) -> bool:
        return any(
            tensor is counter
            for rank in self._ranks
            for stage in rank.stages.values()
            if stage.update.optimizer is not None
            for state in stage.update.optimizer.state.values()
            for counter in map(state.get, ON_THE_HOST)
        )


@contextmanager
def read_out_apart(mode: ValuesAsked, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let the verdicts alone be read; gives how many numbers each of them had."""
    verdicts: list[int] = []

    def reading(numbers: Tensor) -> Exchange[list[float]]:
        def take() -> list[float]:
            verdicts.append(len(numbers))
            mode.allowed = True
            try:
                return to_host(numbers).take()
            finally:
                mode.allowed = False

        return Exchange(ready=lambda: True, wait=lambda: None, take=take)

    monkeypatch.setattr(stages.update.update_phases, "to_host", reading)
    yield verdicts


def values_asked(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], int]:
    """Operators that asked for values in a segment, and how many verdicts were read."""
    ranks = ranks_of(config)
    program = segment_program(config, first_step=0, steps=config.train.steps)
    mode = ValuesAsked(ranks)
    with read_out_apart(mode, monkeypatch) as verdicts, mode:
        drive([rank.executor.run(program) for rank in ranks])
    return mode.asked, len(verdicts)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("interleaved-1f1b", {"chunks": 2}),
        ("zero-bubble", {}),
        ("2bw", {"coefficient": 1.0}),
        ("2bw", {"data": 2, "precision": "bfloat16", "recompute": "full"}),
        ("pipedream", {"update_interval": 1}),
        ("paci", {"clip": "none"}),
    ],
)
def test_schedules_ask_for_nothing_but_verdicts(
    schedule: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(schedule, steps=2, **options)
    asked, verdicts = values_asked(config, monkeypatch)
    assert asked == []
    assert verdicts > 0


@pytest.mark.parametrize("optimizer", NAMES)
def test_optimizers_ask_for_nothing(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config("1f1b", stages=1, layers=2, steps=3, optimizer=optimizer)
    asked, _ = values_asked(config, monkeypatch)
    assert asked == []


def test_the_watch_notices_what_asks() -> None:
    mode = ValuesAsked([])
    with mode:
        values = torch.ones(3)
        float(values.sum())
        bool(values[0] > 0)
        values.nonzero()
        values[values > 0]
    assert len(mode.asked) >= 4
