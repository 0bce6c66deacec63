"""Selective recomputation keeps nothing of a cheap part from forward to backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from stages.model.gradients.selective import cheap, run_selectively


class Gated(nn.Module):
    """A cheap part between two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(4, 8), nn.Linear(8, 4)
        self.made: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(cheap(self.square, self.before(x)))  # type: ignore[no-any-return]

    def square(self, x: Tensor) -> Tensor:
        out = x * x.sigmoid()
        self.made.append(StorageWeakRef(out.untyped_storage()))
        return out


def test_the_output_of_a_cheap_part_is_gone_after_the_forward_and_again_after_the_backward() -> None:
    block, x = Gated(), torch.randn(3, 4, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    block.made.clear()
    out = run_selectively(block, x)
    assert [storage.expired() for storage in block.made] == [True]
    given = torch.autograd.grad(out.sum(), [x, *block.parameters()])
    assert [storage.expired() for storage in block.made] == [True, True]
    assert all(map(torch.equal, given, expected))
