"""Reads the tensors of a checkpoint.

Security: torch's reader unpickles the file `.metadata`. Here a restricted unpickler creates only the few
    classes of such a file, and its result is checked before use. torch itself reads tensors with
    `weights_only=True`; all other state is in state.json, so `torch.load` is never called without it.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from stages.checkpoint.files import DESCRIPTION, CheckpointError, open_file, read_manifest, read_whole

_MOST_DIMENSIONS = 64
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""Types of the tensors that weights, optimizers and corrections have."""


class CheckpointReader(FileSystemReader):
    """torch's reader of a checkpoint, with checks when it reads `.metadata` and opens files.

    Raises:
        CheckpointError: `.metadata` is not that of a checkpoint written here.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _CheckedFiles()
        self._metadata = _checked(_unpickle(folder / DESCRIPTION), sizes=_listed_sizes(folder))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def sizes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and type of each tensor, by key."""
        entries: Mapping[str, Any] = self._metadata.state_dict_metadata
        return {key: (entry.size, entry.properties.dtype) for key, entry in entries.items()}

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Read saved tensors into those given by key; shapes and types must be those of `sizes`.

        Raises:
            CheckpointError: a file does not match `.metadata`.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # it warns that no other process takes part, which is intended
                load(dict(into), storage_reader=self, no_dist=True)
        except (Exception, CheckpointException) as error:
            # torch raises many kinds of errors for a file that is not its own; some recommend unsafe loading.
            causes = list(error.failures.values()) if isinstance(error, CheckpointException) else []
            cause = causes[0][0] if causes else error
            raise CheckpointError(
                f"its tensors are not what {DESCRIPTION} says ({type(cause).__name__})"
            ) from error


class _CheckedFiles(FileSystem):
    """torch's file access, restricted to regular files."""

    def create_stream(self, path: Any, mode: str) -> Any:
        if mode != "rb":
            raise ValueError("a checkpoint is only read here")
        return open_file(Path(path))


def _listed_sizes(folder: Path) -> dict[str, int]:
    return {
        name: int(entry["bytes"])
        for name, entry in read_manifest(folder).items()
        if type(entry.get("bytes")) is int
    }


def _unpickle(file: Path) -> object:
    try:
        return _MetadataUnpickler(io.BytesIO(read_whole(file))).load()
    except CheckpointError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise CheckpointError(f"{file.name} cannot be read ({why[:200]})") from error


def _checked(metadata: object, *, sizes: Mapping[str, int]) -> Metadata:
    """A checked copy of unpickled metadata, whose tensors all lie within files of the checkpoint.

    Args:
        metadata: the unpickled object.
        sizes: bytes of each file in the manifest.

    Raises:
        CheckpointError: it is not such metadata.
    """
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{DESCRIPTION} is not the description of a checkpoint")
    tensors, places = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        raise CheckpointError(f"{DESCRIPTION} describes no tensors")
    for index, place in places.items():
        if not (isinstance(index, MetadataIndex) and _is_place(place, sizes)):
            raise CheckpointError(f"{DESCRIPTION} names a place that is in no file of the checkpoint")
    by_key = {index.fqn: place for index, place in places.items()}
    described: dict[str, TensorStorageMetadata] = {}
    for key, entry in dict[Any, Any](tensors).items():
        if not (isinstance(key, str) and _is_tensor(entry)):
            raise CheckpointError(f"{DESCRIPTION}: {ascii(key)[:80]} is no tensor")
        place = by_key.get(key)
        if place is None or place.length < entry.size.numel() * entry.properties.dtype.itemsize:
            raise CheckpointError(f"{DESCRIPTION}: {ascii(key)[:80]} is larger than its place")
        size, properties = entry.size, TensorProperties(dtype=entry.properties.dtype)
        chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
        described[key] = TensorStorageMetadata(properties=properties, size=size, chunks=[chunk])
    storage: dict[MetadataIndex, Any] = {
        MetadataIndex(key, entry.chunks[0].offsets): _StorageInfo(
            by_key[key].relative_path, by_key[key].offset, by_key[key].length
        )
        for key, entry in described.items()
    }
    # A new object of checked parts only: nothing else reaches torch.
    return Metadata({**described}, {key: (key,) for key in described}, storage, StorageMeta())


def _is_place(place: object, sizes: Mapping[str, int]) -> bool:
    if not isinstance(place, _StorageInfo):
        return False
    numbers = (vars(place).get("offset"), vars(place).get("length"))
    name = vars(place).get("relative_path")
    return (
        isinstance(name, str)
        and name in sizes
        and all(type(number) is int and number >= 0 for number in numbers)
        and place.offset + place.length <= sizes[name]
    )


def _is_tensor(entry: object) -> bool:
    if not isinstance(entry, TensorStorageMetadata):
        return False
    size, properties = vars(entry).get("size"), vars(entry).get("properties")
    return (
        isinstance(size, torch.Size)
        and len(size) <= _MOST_DIMENSIONS
        and all(number >= 0 for number in size)
        and isinstance(properties, TensorProperties)
        and vars(properties).get("dtype") in _DTYPES
    )


_METADATA_CLASSES = (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)


_PythonUnpickler: Any = pickle._Unpickler


class _MetadataUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """Creates and changes only objects of the classes that `.metadata` consists of.

    Derived from Python's unpickler, not from the one in C, which allocates as much memory as a file claims.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_PythonUnpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
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
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in allowed.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(f".metadata names {module}.{name}, which no checkpoint needs")

    def _build(self) -> None:
        state, target = self.stack[-1], self.stack[-2]
        from_tuple = type(target) is TensorProperties and isinstance(state, tuple)
        if type(target) not in _METADATA_CLASSES or not (from_tuple or isinstance(state, dict)):
            raise CheckpointError(f".metadata changes a {type(target).__name__}, which no checkpoint needs")
        self.load_build()

    dispatch[pickle.BUILD[0]] = _build
