"""Reads the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stages.checkpoint.files import CheckpointError, Index, SavedTensor
from stages.checkpoint.writer import SAFETENSORS_DTYPES

Form = tuple[torch.Size, torch.dtype]
"""Shape and type of a tensor."""


class CheckpointReader:
    """Reads tensors of the checkpoint in `folder`, whose files match its manifest."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder = folder
        self._tensors = index.tensors

    def forms(self) -> dict[str, Form]:
        """Shape and type of each tensor, by key."""
        return {key: _form(tensor) for key, tensor in self._tensors.items()}

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Read saved tensors into those given by key; shapes and types must be those of `forms`.

        Raises:
            CheckpointError: a file does not hold the tensors that the index says.
        """
        by_file: dict[str, list[str]] = {}
        for key in into:
            by_file.setdefault(self._tensors[key].file, []).append(key)
        for file, keys in by_file.items():
            try:
                with self._opened(file) as opened:
                    for key in keys:
                        self._check(file, key, opened.get_slice(key))
                        with torch.no_grad():
                            into[key].copy_(opened.get_tensor(key))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read ({' '.join(str(error).split())})") from error

    def _opened(self, file: str) -> Any:
        try:
            return safe_open(self._folder / file, framework="pt")
        except RuntimeError as error:  # torch's, where the file is gone: a newer checkpoint replaced it
            raise CheckpointError(f"{file} cannot be read ({' '.join(str(error).split())})") from error

    def _check(self, file: str, key: str, saved: Any) -> None:
        shape, dtype = _form(self._tensors[key])
        if (saved.get_shape(), saved.get_dtype()) != (list(shape), SAFETENSORS_DTYPES[dtype]):
            raise CheckpointError(f"{file}: {key} is not what the index says")


def _form(tensor: SavedTensor) -> Form:
    return torch.Size(tensor.shape), getattr(torch, tensor.dtype)
