"""What a rank holds at once, and that nothing of a run stays in its process."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_runs import Operators, Rows, small_config, with_experts
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from schedules import Op
from stages.memory.in_flight import Moment, _largest
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


COUNTS = st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 3))] * 2)
MOMENTS = st.frozensets(
    st.builds(Moment, st.sampled_from([Op.FORWARD, Op.UPDATE]), st.integers(0, 1), COUNTS)
)


def _exceeds(one: Moment, other: Moment) -> bool:
    pairs = [
        pair for stages in zip(one.counts, other.counts, strict=True) for pair in zip(*stages, strict=True)
    ]
    return one != other and one[:2] == other[:2] and all(more >= less for more, less in pairs)


@given(MOMENTS)
def test_no_moment_is_left_out_that_no_other_exceeds(moments: frozenset[Moment]) -> None:
    wanted = {moment for moment in moments if not any(_exceeds(other, moment) for other in moments)}
    assert set(_largest(moments)) == wanted
