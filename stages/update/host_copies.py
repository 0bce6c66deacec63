"""Copies of tensors in host memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stages.comm.collectives import Exchange


class HostCopies:
    """Copies tensors into reused host buffers, so that a checkpoint can be written while training goes on."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.Size, torch.dtype, bool], list[Tensor]] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the tensors by the same keys; they overwrite those of the last call."""
        free = {kind: list(buffers) for kind, buffers in self._buffers.items()}
        taken: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            kind = (tensor.shape, tensor.dtype, tensor.is_cuda)
            if not free.get(kind):
                # A GPU copies faster into pinned memory, and all tensors at once.
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._buffers.setdefault(kind, []).append(buffer)
                free.setdefault(kind, []).append(buffer)
            taken[key] = free[kind].pop().copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return taken


def to_host(numbers: Tensor) -> Exchange[list[float]]:
    """Start copying a row of numbers to the host."""
    if not numbers.is_cuda:
        return Exchange(ready=lambda: True, wait=lambda: None, take=numbers.tolist)
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return Exchange(ready=copied.query, wait=copied.synchronize, take=copy.tolist)
