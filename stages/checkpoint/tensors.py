"""Copies the tensors of a checkpoint to host memory, writes them to safetensors files, and reads them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stages.checkpoint.files import CheckpointError, FileEntry, Index, SavedTensor
from stages.shape.head import split_name

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


Form = tuple[torch.Size, torch.dtype]
"""Shape and type of a tensor."""


class CheckpointReader:
    """Reads tensors of the checkpoint in `folder`, whose files match its manifest.

    A tensor that was saved in shards of rows (`stages.shape.head`) is read whole, or any of its rows.

    Raises:
        CheckpointError: the shards of a tensor do not fit together.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder = folder
        self._tensors = index.tensors
        self._shards: dict[str, list[tuple[range, str]]] = {}
        """By key of the whole tensor, the rows and key of each shard, in order."""
        for saved in index.tensors:
            key, rows = split_name(saved)
            if rows is not None:
                self._shards.setdefault(key, []).append((rows, saved))
        for key, shards in self._shards.items():
            shards.sort(key=lambda shard: shard[0].start)
            ends = [0, *(rows.stop for rows, _ in shards)]
            if key in index.tensors or [rows.start for rows, _ in shards] != ends[:-1]:
                raise CheckpointError(f"the rows of {key} in it are not all of them, each once")

    def forms(self) -> dict[str, Form]:
        """Shape and type of each tensor, by key; of shards, those of the whole."""
        forms = {key: _form(tensor) for key, tensor in self._tensors.items() if split_name(key)[1] is None}
        for key, shards in self._shards.items():
            own = [_form(self._tensors[shard]) for _, shard in shards]
            (shape, dtype), last = own[0], shards[-1][0].stop
            if shape:
                shape = torch.Size((last, *shape[1:]))
            if own != [row_form((shape, dtype), rows) for rows, _ in shards]:
                raise CheckpointError(f"the rows of {key} in it are not of the form that their names say")
            forms[key] = shape, dtype
        return forms

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Read saved tensors, or rows of them, into those given by key; shapes and types must be those of
        `forms`.

        Raises:
            CheckpointError: a file does not hold the tensors that the index says.
        """
        by_file: dict[str, list[tuple[str, slice, Tensor]]] = {}
        for key, target in into.items():
            for saved, rows, part in self._pieces(key, target):
                by_file.setdefault(self._tensors[saved].file, []).append((saved, rows, part))
        for file, pieces in by_file.items():
            try:
                with self._opened(file) as opened:
                    for saved, rows, part in pieces:
                        tensor = opened.get_slice(saved)
                        self._check(file, saved, tensor)
                        whole = part.ndim == 0 or rows == slice(None)
                        with torch.no_grad():
                            part.copy_(opened.get_tensor(saved) if whole else tensor[rows])
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read ({' '.join(str(error).split())})") from error

    def _opened(self, file: str) -> Any:
        try:
            return safe_open(self._folder / file, framework="pt")
        except RuntimeError as error:  # torch's, where the file is gone: a newer checkpoint replaced it
            raise CheckpointError(f"{file} cannot be read ({' '.join(str(error).split())})") from error

    def _pieces(self, key: str, target: Tensor) -> Iterator[tuple[str, slice, Tensor]]:
        """The saved tensors that make up tensor `key`: each one's key, its rows to read, and the part of
        `target` that they go to."""
        base, wanted = split_name(key)
        if base in self._tensors:
            yield base, slice(None) if wanted is None else slice(wanted.start, wanted.stop), target
            return
        shards = self._shards[base]
        if target.ndim == 0:
            yield shards[0][1], slice(None), target
            return
        wanted = range(len(target)) if wanted is None else wanted
        for rows, saved in shards:
            first, end = max(rows.start, wanted.start), min(rows.stop, wanted.stop)
            if first < end:
                part = target[first - wanted.start : end - wanted.start]
                yield saved, slice(first - rows.start, end - rows.start), part

    def _check(self, file: str, key: str, saved: Any) -> None:
        shape, dtype = _form(self._tensors[key])
        if (saved.get_shape(), saved.get_dtype()) != (list(shape), SAFETENSORS_DTYPES[dtype]):
            raise CheckpointError(f"{file}: {key} is not what the index says")


def row_form(form: Form, rows: range | None) -> Form:
    """Shape and type of some rows of a tensor of this form; a number per parameter has no rows."""
    shape, dtype = form
    return form if rows is None or not shape else (torch.Size((len(rows), *shape[1:])), dtype)


def _form(tensor: SavedTensor) -> Form:
    return torch.Size(tensor.shape), getattr(torch, tensor.dtype)
