"""A run's weights as safetensors: under our own names, or as the Llama that `transformers` loads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path

from safetensors.torch import save_file

from stages.checkpoint_files import CheckpointError
from stages.config import RunConfig
from stages.llama_layout import llama_config, llama_names, parameter_shapes
from stages.saved_weights import SavedWeights, Weights

SHARD_BYTES = 4 * 10**9
"""Most bytes of weights in one file; also about the memory that writing takes."""
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class Layout(StrEnum):
    """What is written."""

    HF = "hf"
    """Names of `transformers`' Llama, and its config.json."""
    SAFETENSORS = "safetensors"
    """Our own names, weights alone."""


def write_weights(
    saved: SavedWeights,
    config: RunConfig,
    folder: Path,
    *,
    layout: Layout,
    weights: Weights,
    end_of_document: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write the weights into an empty folder; returns how many numbers they are.

    One file, or with more than `shard_bytes` several and an index, as `transformers` has them. At most one
    file's weights are in memory at a time.

    Raises:
        CheckpointError: the model is not the decoder that `transformers` knows (`hf` only).
    """
    names = _names(saved, config, layout, weights)
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
    if layout is Layout.HF:
        _, dtype = saved.size(next(iter(names)), weights)
        dtype_name = str(dtype).removeprefix("torch.")
        content = llama_config(
            config.model,
            context=config.data.context,
            dtype=dtype_name,
            end_of_document=end_of_document,
        )
        _write_json(folder / "config.json", content)
    return sum(saved.size(name, weights)[0].numel() for name in names)


def _names(saved: SavedWeights, config: RunConfig, layout: Layout, weights: Weights) -> dict[str, str]:
    """By each parameter, in the order of writing, its name in the files."""
    llama = llama_names(config.model)
    if layout is Layout.SAFETENSORS:
        ordered = [name for name in llama if name in saved.names]
        return {name: name for name in [*ordered, *sorted(saved.names - llama.keys())]}
    if differing := sorted(saved.names ^ llama.keys()):
        raise CheckpointError(
            f"the run's model is not the decoder that transformers knows ({differing[0]}); "
            "accepted for it: --format safetensors"
        )
    for name, shape in parameter_shapes(config.model).items():
        there = tuple(saved.size(name, weights)[0])
        if there != shape:
            raise CheckpointError(f"{name} was saved as {list(there)}, the run's model has {list(shape)}")
    return llama


def _shards(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    shard: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if shard and filled + size > most:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard


def _write_json(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
