"""Export of a run's weights as safetensors: under our own names, or for Hugging Face transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from stages.checkpoint.export_options import ExportFormat, Weights
from stages.checkpoint.files import CheckpointError
from stages.checkpoint.initial_weights import INDEX_FILE, WEIGHTS_FILE
from stages.checkpoint.saved_weights import SavedWeights
from stages.config.run_config import RunConfig
from stages.shape.families import describe
from stages.shape.hf_config import hf_config, hugging_face_of
from stages.shape.moe_hugging_face import NoClassError, empty_weights
from stages.shape.parametrization import factor_in_plain_decoder

SHARD_BYTES = 4 * 10**9
"""Most bytes of weights in one file; also about the memory that writing takes."""


def write_weights(
    saved: SavedWeights,
    config: RunConfig,
    folder: Path,
    *,
    format: ExportFormat,
    weights: Weights,
    start_of_document: int | None = None,
    end_of_document: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write the weights into an empty folder; returns the number of values.

    Weights of more than `shard_bytes` are written as several files and an index, in the layout of
    `transformers`. At most one file's weights are in memory at a time.

    Raises:
        CheckpointError: `transformers` has no class that computes the same (`hf` only).
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
        tensors = {names[name]: tensor for name, tensor in saved.read(shard, weights).items()}
        for name in shard:
            if (factor := factor_in_plain_decoder(config.model, name)) != 1:
                tensors[names[name]] = tensors[names[name]] * factor
        if number == len(shards) and format is ExportFormat.HF:
            tensors |= {name: torch.empty(shape) for name, shape in empty_weights(config.model).items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
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
            start_of_document=start_of_document,
            end_of_document=end_of_document,
        )
        _write_json(folder / "config.json", content)
    return sum(saved.size(name, weights)[0].numel() for name in names if name not in saved.biases)


def _names(saved: SavedWeights, config: RunConfig, format: ExportFormat, weights: Weights) -> dict[str, str]:
    """Name in the files of each parameter, or member of one, and balance bias, in the order of writing."""
    spec = describe(config.model)
    parameters = {member.name: member for parameter in spec.whole() for member in parameter.members()}
    parameters |= {bias.name: bias for bias in spec.biases()}
    saved_names = {*saved.names, *saved.biases}
    if format is ExportFormat.SAFETENSORS:
        ordered = [name for name in parameters if name in saved_names]
        return {name: name for name in [*ordered, *sorted(saved_names - parameters.keys())]}
    try:
        has_bias = hugging_face_of(config.model).has_bias
    except NoClassError as error:
        raise CheckpointError(f"{error}; accepted for it: --format safetensors") from error
    if not has_bias:
        _check_unbiased(saved, weights)
        saved_names -= saved.biases
        parameters = {name: tensor for name, tensor in parameters.items() if name not in saved.biases}
    if differing := sorted(saved_names ^ parameters.keys()):
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


def _check_unbiased(saved: SavedWeights, weights: Weights) -> None:
    for name, bias in saved.read(saved.biases, weights).items():
        if bias.any():
            raise CheckpointError(
                f"{name} is not 0, and transformers has no place for it beside model.router_score: softmax; "
                "accepted: --format safetensors"
            )


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
