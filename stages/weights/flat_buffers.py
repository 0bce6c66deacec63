"""Flat buffers of a stage, with a view for each of its parameters and for each member of a stack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stages.comm.gradient_reduction import runs_of
from stages.shape.optimizer_sharding import Run
from stages.shape.spec import Shape, is_stack


def flat_views(
    shapes: Sequence[Shape], *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """A flat buffer of tensors of these shapes, one after another, and a view of it for each."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
    return flat, [piece.view(shape) for piece, shape in zip(torch.split(flat, sizes), shapes, strict=True)]


def members_of(tensor: Tensor) -> list[Tensor]:
    """The members of a parameter, or of a tensor like it; those of a stack share its memory and its count of
    writes."""
    if not is_stack(tuple(tensor.shape)):
        return [tensor]
    return [tensor.detach()[index] for index in range(len(tensor))]


class Master:
    """The master copy of the members (`stages.shape.spec`) of parameters that this data rank owns, in the
    model's order."""

    def __init__(self, names: list[str], parameters: list[nn.Parameter]) -> None:
        self.names = names
        self.parameters = parameters

    def not_finite(self) -> str | None:
        """Name of the first member with a value that is not finite; None: there is none."""
        named = zip(self.names, self.parameters, strict=True)
        return next((name for name, weight in named if not bool(weight.isfinite().all())), None)


class GradientBuffer:
    """The gradient of one step: a flat buffer into which backwards of any replica accumulate, with a view per
    parameter.

    Args:
        flat: the buffer.
        views: one per parameter.
        part: the members that this data rank owns, and a view for each, if their sums over the data ranks
            have a buffer of their own; that of the next step then accumulates in `flat`, too, once the sums
            are taken. None: the sums are in `flat`.
        runs: of the buffer, that this data rank owns.
        owned: numbers of the members in these runs.
        loads: tokens by expert for each of the stage's blocks of experts, int64 `(blocks, experts)`, zero.
    """

    def __init__(
        self,
        flat: Tensor,
        views: list[Tensor],
        *,
        part: tuple[Tensor, list[Tensor]] | None,
        runs: Sequence[Run],
        owned: Sequence[int],
        loads: Tensor,
    ) -> None:
        self.flat = flat
        self.views = views
        self.part = None if part is None else part[0]
        self.owned_runs = runs_of(flat, runs) if part is None else [part[0]]
        members = [member for view in views for member in members_of(view)]
        self.owned_views = [members[number] for number in owned] if part is None else part[1]
        """One for each member that this data rank owns."""
        self.counted_views = self.owned_views
        """Those whose squares it adds to the norm: of members that several ranks own, one counts."""
        self.versions: list[int] = []
        """For each accumulated micro-batch, the version that its forward read."""
        self.loads = loads
        """Tokens by expert of the accumulated micro-batches, each counted once; over all data ranks once they
        are reduced."""

    def count(self, version: int, loads: Sequence[Tensor]) -> None:
        """Note that the gradient of a micro-batch is complete.

        Args:
            version: that its forward read.
            loads: of each block of experts, int64 `(experts,)`.
        """
        self.versions.append(version)
        for total, load in zip(self.loads, loads, strict=True):
            total += load

    def clear(self) -> None:
        """Forget the gradient, after its update."""
        if self.part is None:
            self.flat.zero_()
        self.loads.zero_()
        self.versions.clear()
