"""Nothing of a run stays in its process: one that trains several runs has room for each."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from support.operators import Operators
from support.small_runs import Rows, small_config, with_experts
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from stages.trainer import replay


class Made(Operators):
    """Notes, by its shape, the memory of every floating-point tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[StorageWeakRef, tuple[int, ...]] = {}

    def note(self, operator: Any, given: tuple[Any, ...], out: Any) -> None:
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.shapes.setdefault(StorageWeakRef(tensor.untyped_storage()), tuple(tensor.shape))

    def living(self) -> list[tuple[int, ...]]:
        gc.collect()
        return [shape for storage, shape in self.shapes.items() if not storage.expired()]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("schedule", "experts"), [("2bw", False), ("zero-bubble", False), ("zero-bubble", True)]
)
def test_a_run_that_is_over_has_left_no_tensor(schedule: str, experts: bool, recompute: str) -> None:
    """What a hook keeps in autograd's graph, and what keeps the graph, no collector finds."""
    config = small_config(schedule, precision="bfloat16", recompute=recompute, steps=2)
    if experts:
        config = with_experts(config, shared_experts=1)
    with Made() as made:
        replay(config, recorder=Rows())
    assert len(made.shapes) > 100
    assert made.living() == []
