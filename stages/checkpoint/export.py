"""Export of a run's weights as safetensors: under our own names, or for Hugging Face transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file

from stages.checkpoint.export_options import ExportFormat, Weights
from stages.checkpoint.files import CheckpointError
from stages.checkpoint.saved_weights import SavedWeights
from stages.config import RunConfig
from stages.model.families.catalogue import describe
from stages.model.hf_config import hf_config

SHARD_BYTES = 4 * 10**9
"""Most bytes of weights in one file; also about the memory that writing takes."""
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def write_weights(
    saved: SavedWeights,
    config: RunConfig,
    folder: Path,
    *,
    format: ExportFormat,
    weights: Weights,
    end_of_document: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write the weights into an empty folder; returns the number of values.

    Weights of more than `shard_bytes` are written as several files and an index, in the layout of
    `transformers`. At most one file's weights are in memory at a time.

    Raises:
        CheckpointError: the model is not a decoder that `transformers` knows (`hf` only).
    """
    names = _names(saved, config, format, weights)
    sizes = {}
    for name in names:
        shape, dtype = saved.size(name, weights)
        sizes[name] = shape.numel() * dtype.itemsize
    shards = list(_shards(sizes, shard_bytes))
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS_FILE
        if len(shards) > 1:
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = saved.read(shard, weights)
        save_file({names[name]: tensors[name] for name in shard}, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys((names[name] for name in shard), file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(files.items()))}
        _write_json(folder / INDEX_FILE, index)
    if format is ExportFormat.HF:
        _, dtype = saved.size(next(iter(names)), weights)
        dtype_name = str(dtype).removeprefix("torch.")
        content = hf_config(
            config.model,
            context=config.data.context,
            dtype=dtype_name,
            end_of_document=end_of_document,
        )
        _write_json(folder / "config.json", content)
    return sum(saved.size(name, weights)[0].numel() for name in names)


def _names(saved: SavedWeights, config: RunConfig, format: ExportFormat, weights: Weights) -> dict[str, str]:
    """Name in the files of each parameter, in the order of writing."""
    parameters = {parameter.name: parameter for parameter in describe(config.model).whole()}
    if format is ExportFormat.SAFETENSORS:
        ordered = [name for name in parameters if name in saved.names]
        return {name: name for name in [*ordered, *sorted(saved.names - parameters.keys())]}
    if differing := sorted(saved.names ^ parameters.keys()):
        raise CheckpointError(
            f"the run's model is not a decoder that transformers knows ({differing[0]}); "
            "accepted for it: --format safetensors"
        )
    for name, parameter in parameters.items():
        shape = tuple(saved.size(name, weights)[0])
        if shape != parameter.shape:
            raise CheckpointError(
                f"{name} was saved as {list(shape)}, the run's model has {list(parameter.shape)}"
            )
    return {name: parameter.hf_name for name, parameter in parameters.items()}


def _shards(sizes: Mapping[str, int], shard_bytes: int) -> Iterator[list[str]]:
    """Group names so that each file has at most `shard_bytes`, or one weight."""
    shard: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if shard and filled + size > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard


def _write_json(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
