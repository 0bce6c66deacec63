"""Weights that a run starts from: safetensors under our own names, or of a Llama. Imports no torch.

`model.init` names a file, or a folder with `model.safetensors` or an index of several files, as
`asyncpp export` and `transformers` write them. Its content is part of the run's identity by the hash that
`model.init_sha256` holds; where it lies is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.config import ModelConfig
from stages.llama_layout import config_differences, llama_names, parameter_shapes

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"


class InitError(ValueError):
    """A run cannot start from these weights."""


def _files(path: Path) -> list[Path]:
    """The weight files, in order of their names."""
    if path.is_file():
        return [path]
    index = path / INDEX_FILE
    if index.is_file():
        names = set(_json(index).get("weight_map", {}).values())
        if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise InitError(f"{index} names no files beside it")
        return [path / name for name in sorted(names)]
    if (path / WEIGHTS_FILE).is_file():
        return [path / WEIGHTS_FILE]
    if not path.exists():
        raise InitError(f"{path} does not exist")
    raise InitError(f"{path} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}")


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InitError(f"{file} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise InitError(f"{file} holds no JSON object")
    return content


def content_sha256(path: Path) -> str:
    """SHA-256 of what the weight files hold, whatever they are called.

    Raises:
        InitError: they cannot be read.
    """
    together = hashlib.sha256()
    for file in _files(path):
        try:
            stat = file.stat()
            together.update(_digest(file, stat.st_size, stat.st_mtime_ns))
        except OSError as error:
            raise InitError(f"{file} cannot be read ({error.strerror})") from error
    return together.hexdigest()


@lru_cache(maxsize=1024)  # every cell of a matrix may start from the same
def _digest(file: Path, _size: int, _modified: int) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def check_init(config: ModelConfig) -> None:
    """Whether the decoder can start from `config.init`, by names, shapes and config.json; reads no weights.

    Raises:
        InitError: says which weight or setting does not fit.
    """
    path = Path(str(config.init))
    found = _shapes(path)
    names = _names_in(config, found)
    for name, shape in parameter_shapes(config).items():
        there = found.get(names[name])
        if there is None:
            raise InitError(f"{path} has no {names[name]}")
        if there != shape:
            raise InitError(
                f"{path}: {names[name]} is {list(there)}, the model {config.name} has {list(shape)}"
            )
    unknown = sorted(
        name for name in found.keys() - set(names.values()) if not name.endswith("rotary_emb.inv_freq")
    )
    if unknown:
        raise InitError(f"{path} has {unknown[0]}, which the model {config.name} has no place for")
    description = (path if path.is_dir() else path.parent) / CONFIG_FILE
    if description.is_file() and (differences := config_differences(config, _json(description))):
        raise InitError(f"{description}: {differences[0]}")


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each weight in the files."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(path):
        try:
            with safe_open(file, framework="np") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InitError(f"{file} is not safetensors ({error})") from error
    return shapes


def _names_in(config: ModelConfig, found: Mapping[str, object]) -> dict[str, str]:
    """By each parameter its name in the files. Where head and embedding are one there, both start from it."""
    names = llama_names(config)
    if names["embedding.weight"] not in found:
        return {name: name for name in names}
    if names["head.weight"] not in found:
        names["head.weight"] = names["embedding.weight"]
    return names


def read_initial(config: ModelConfig, names: Collection[str]) -> dict[str, Tensor]:
    """The weights that these parameters start from, by name.

    Raises:
        InitError: they do not fit the decoder, or are not those that `init_sha256` promises.
    """
    from safetensors import safe_open

    path = Path(str(config.init))
    check_init(config)
    if config.init_sha256 is not None and content_sha256(path) != config.init_sha256:
        raise InitError(f"{path} has changed since the run was made (its SHA-256 differs)")
    wanted = {name: there for name, there in _names_in(config, _shapes(path)).items() if name in names}
    read: dict[str, Tensor] = {}
    for file in _files(path):
        with safe_open(file, framework="pt") as opened:
            here = set(opened.keys())
            read |= {name: opened.get_tensor(there) for name, there in wanted.items() if there in here}
    return read
