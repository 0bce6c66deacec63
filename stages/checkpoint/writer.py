"""Writes a checkpoint's tensors in the format of torch.distributed.checkpoint.

torch's own `save` exchanges pickles between processes. Here each process plans and writes its part alone,
since no tensor belongs to two of them, and reports where its tensors are to rank 0, which writes `.metadata`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from stages.comm.rendezvous.authenticated import Json


def write_part(folder: Path, tensors: Mapping[str, Tensor], *, rank: int) -> list[Json]:
    """Write the tensors of one process; returns their descriptions for `write_description`.

    Raises:
        OSError: they could not be written.
    """
    writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
    planner.set_up_planner(dict(tensors), writer.storage_meta(), rank == 0)
    plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    [plan] = writer.prepare_global_plan(plans)
    try:
        written = writer.write_data(planner.finish_plan(plan), planner).value()
    except RuntimeError as error:
        # torch reports a full disk as an error of its ZIP file; find the cause.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        raise (cause or OSError(f"torch's writer: {error}")) from None
    return [
        {
            "name": result.index.fqn,
            "size": list(tensors[result.index.fqn].shape),
            "dtype": str(tensors[result.index.fqn].dtype).removeprefix("torch."),
            "file": result.storage_data.relative_path,
            "offset": result.storage_data.offset,
            "length": result.storage_data.length,
        }
        for result in written
    ]


def write_description(folder: Path, parts: Iterable[Json]) -> None:
    """Write `.metadata`, which describes all tensors and where they are."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    results = []
    for part in parts:
        size, offsets = torch.Size(part["size"]), torch.Size([0] * len(part["size"]))
        tensors[part["name"]] = TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, part["dtype"])),
            size=size,
            chunks=[ChunkStorageMetadata(offsets=offsets, sizes=size)],
        )
        results.append(
            WriteResult(
                index=MetadataIndex(part["name"], offsets),
                size_in_bytes=part["length"],
                storage_data=_StorageInfo(part["file"], part["offset"], part["length"]),
            )
        )
    planner_data = {name: (name,) for name in tensors}
    FileSystemWriter(folder).finish(Metadata(tensors, planner_data), [results])
