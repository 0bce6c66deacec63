"""Copies the tensors of one process, and writes them as a safetensors file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.checkpoint.files import FileEntry, SavedTensor

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the types in the format (huggingface.co/docs/safetensors)."""


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, SavedTensor], FileEntry]:
    """Write tensors in host memory to a new file, and flush it to the disk.

    The library would copy them first, and would need another pass over the file for its SHA-256.

    Returns:
        Where each tensor is, by key, and the file's size and SHA-256.

    Raises:
        OSError: it could not be written.
    """
    # Each starts at a multiple of its number size.
    keys = sorted(tensors, key=lambda key: (-tensors[key].itemsize, key))
    header: dict[str, object] = {}
    end = 0
    for key in keys:
        start, end = end, end + tensors[key].nbytes
        header[key] = {
            "dtype": SAFETENSORS_DTYPES[tensors[key].dtype],
            "shape": list(tensors[key].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sha256 = hashlib.sha256()
    with file.open("xb", buffering=0) as opened:
        pieces: list[Any] = [len(text).to_bytes(8, "little"), text]
        pieces += [tensors[key].reshape(-1).view(torch.uint8).numpy() for key in keys]
        for piece in pieces:
            left = memoryview(piece)
            sha256.update(left)
            while left:
                left = left[opened.write(left) :]
        os.fsync(opened.fileno())
    places = {
        key: SavedTensor(
            file=file.name,
            dtype=str(tensors[key].dtype).removeprefix("torch."),  # type: ignore[arg-type]
            shape=list(tensors[key].shape),
        )
        for key in keys
    }
    return places, FileEntry(bytes=8 + len(text) + end, sha256=sha256.hexdigest())


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
