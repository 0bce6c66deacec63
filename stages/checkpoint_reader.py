"""Reads the tensors of a checkpoint's folder.

Security: torch's reader unpickles the file `.metadata`. Here that goes through an unpickler that makes
nothing but the few classes which such a file holds. Tensors are read with `weights_only=True` by torch
itself, and what is no tensor stands in state.json, so torch's other way, `torch.load` without it, is never
taken.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from stages.checkpoint_files import CheckpointError


class CheckpointReader(FileSystemReader):
    """torch's reader of one checkpoint's folder, but for how it reads `.metadata`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = _MetadataUnpickler(io.BytesIO((self._folder / ".metadata").read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(".metadata is not the description of a checkpoint")
        return metadata

    def sizes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and type of each tensor, by key."""
        entries: Mapping[str, Any] = self.read_metadata().state_dict_metadata
        strange = [key for key, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)]
        if strange:
            raise CheckpointError(f"{strange[0]} is no tensor")
        return {key: (entry.size, entry.properties.dtype) for key, entry in entries.items()}

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill tensors with what was saved under their keys; shapes and types must be those of `sizes`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that this process reads alone, which is meant
            load(dict(into), storage_reader=self, no_dist=True)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        described = {
            "torch.distributed.checkpoint.metadata": {
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            },
            "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
            "torch": {"Size"},
            "torch.serialization": {"_get_layout"},
            "collections": {"OrderedDict"},
            "pathlib": {"PosixPath", "WindowsPath"},
        }
        a_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if a_type or name in described.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(f".metadata names {module}.{name}, which no checkpoint needs")
