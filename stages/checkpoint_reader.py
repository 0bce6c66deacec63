"""Reads the tensors of a checkpoint's folder.

Security: torch's reader unpickles the file `.metadata`. Here that goes through an unpickler that makes
nothing but the few classes which such a file holds, and changes nothing but what it has made; what it makes
is checked before it is used. Tensors are read with `weights_only=True` by torch itself, and what is no tensor
stands in state.json, so torch's other way, `torch.load` without it, is never taken.
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

from stages.checkpoint_files import DESCRIPTION, CheckpointError, open_file, read_manifest, read_whole

_MOST_DIMENSIONS = 64
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""Of what weights, optimizers and corrections keep."""


class CheckpointReader(FileSystemReader):
    """torch's reader of one checkpoint's folder, but for how it reads `.metadata` and opens files.

    Raises:
        CheckpointError: `.metadata` is not what a checkpoint of ours has.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _CheckedFiles()
        self._metadata = _checked(_unpickled(folder / DESCRIPTION), sizes=_listed_sizes(folder))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def sizes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and type of each tensor, by key."""
        entries: Mapping[str, Any] = self._metadata.state_dict_metadata
        return {key: (entry.size, entry.properties.dtype) for key, entry in entries.items()}

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill tensors with what was saved under their keys; shapes and types must be those of `sizes`.

        Raises:
            CheckpointError: a file does not hold what `.metadata` says.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns that this process reads alone, which is meant
                load(dict(into), storage_reader=self, no_dist=True)
        except (Exception, CheckpointException) as error:
            # torch has many ways to say that a file is not one of its own, and recommends to run its code.
            causes = list(error.failures.values()) if isinstance(error, CheckpointException) else []
            cause = causes[0][0] if causes else error
            raise CheckpointError(
                f"its tensors are not what {DESCRIPTION} says ({type(cause).__name__})"
            ) from error


class _CheckedFiles(FileSystem):
    """torch's way to the files, but for links and what is no file."""

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


def _unpickled(file: Path) -> object:
    try:
        return _MetadataUnpickler(io.BytesIO(read_whole(file))).load()
    except CheckpointError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise CheckpointError(f"{file.name} cannot be read ({why[:200]})") from error


def _checked(metadata: object, *, sizes: Mapping[str, int]) -> Metadata:
    """What was unpickled, if it describes tensors that lie as a whole in files of the checkpoint.

    Args:
        metadata: what was unpickled.
        sizes: bytes of each file that the manifest lists.
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
    # Made anew of what was looked at: nothing else of it reaches torch.
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


_MADE = (
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
    """Python's own unpickler and not the one in C, which reserves as much memory as a file says.

    What may be called, and whose attributes may be set, is what a description is made of.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_PythonUnpickler.dispatch)

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

    def _build(self) -> None:
        state, made = self.stack[-1], self.stack[-2]
        as_made = type(made) is TensorProperties and isinstance(state, tuple)
        if type(made) not in _MADE or not (as_made or isinstance(state, dict)):
            raise CheckpointError(f".metadata changes a {type(made).__name__}, which no checkpoint needs")
        self.load_build()

    dispatch[pickle.BUILD[0]] = _build
