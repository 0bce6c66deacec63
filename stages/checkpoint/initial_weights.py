"""Initial weights from safetensors, under our own names or those of transformers. Imports no torch.

`model.init` names a file, or a folder with `model.safetensors` or an index of several files, as
`asyncpp export` and `transformers` write them. The hash of its content, `model.init_sha256`, is part of the
run's identity; its path is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.config.records import DamagedError, read_bytes
from stages.config.run_config import ModelConfig
from stages.shape.families import describe
from stages.shape.hf_config import config_differences, family_difference
from stages.shape.moe_hugging_face import NoClassError
from stages.shape.moe_settings import BIAS
from stages.shape.parametrization import factor_in_plain_decoder
from stages.shape.spec import Parameter

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
        content = json.loads(read_bytes(file))
    except (OSError, DamagedError, ValueError, RecursionError) as error:
        raise InitError(f"{file} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise InitError(f"{file} holds no JSON object")
    return content


def content_sha256(path: Path) -> str:
    """SHA-256 of the content of the weight files, whatever their names.

    Raises:
        InitError: they cannot be read.
    """
    digest = hashlib.sha256()
    for file in _files(path):
        try:
            stat = file.stat()
            digest.update(_digest(file, stat.st_size, stat.st_mtime_ns))
        except OSError as error:
            raise InitError(f"{file} cannot be read ({error.strerror})") from error
    return digest.hexdigest()


@lru_cache(maxsize=1024)  # many cells of a matrix may start from the same weights
def _digest(file: Path, _size: int, _modified: int) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def check_init(config: ModelConfig) -> None:
    """Check that `config.init` fits the decoder, by names, shapes and config.json; reads no weights.

    Raises:
        InitError: says which weight or setting does not fit.
    """
    path = Path(str(config.init))
    description = (path if path.is_dir() else path.parent) / CONFIG_FILE
    differences: list[str] = []
    if description.is_file():
        content = _json(description)
        try:
            # The family first: another one's weights have other names and shapes, which explain nothing.
            if difference := family_difference(config, content):
                raise InitError(f"{description}: {difference}")
            differences = config_differences(config, content)
        except NoClassError as error:
            raise InitError(f"{description}: {error}") from error
    shapes = _shapes(path)
    names = _names_in(config, shapes)
    for parameter in _tensors(config):
        name = names[parameter.name]
        if name not in shapes:
            if parameter.name.endswith(BIAS):
                continue  # It begins as 0.
            raise InitError(f"{path} has no {name}")
        if shapes[name] != parameter.shape:
            raise InitError(
                f"{path}: {name} is {list(shapes[name])}, the model {config.name} has {list(parameter.shape)}"
            )
    unknown = sorted(
        name
        for name in shapes.keys() - set(names.values())
        if not name.endswith("rotary_emb.inv_freq") and 0 not in shapes[name]
    )
    if unknown:
        raise InitError(f"{path} has {unknown[0]}, which the model {config.name} has no place for")
    if differences:
        raise InitError(f"{description}: {differences[0]}")


def _tensors(config: ModelConfig) -> Iterator[Parameter]:
    """Members of all parameters, and the balance biases."""
    spec = describe(config)
    for parameter in spec.whole():
        yield from parameter.members()
    yield from spec.biases()


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


def _names_in(config: ModelConfig, content: Mapping[str, object]) -> dict[str, str]:
    """Name in the files of each parameter, or member of one, and balance bias. Where the files have a tied
    head and the model has not, its head starts as a copy of the embedding."""
    names = {parameter.name: parameter.hf_name for parameter in _tensors(config)}
    if names["embedding.weight"] not in content:
        names = {name: name for name in names}
    if not config.tied and names["head.weight"] not in content:
        names["head.weight"] = names["embedding.weight"]
    return names


def read_initial(
    config: ModelConfig, names: Collection[str], *, verify_hash: bool = True
) -> dict[str, Tensor]:
    """Initial weights of these parameters, by name; without the balance biases that the files lack.

    Args:
        config: the model.
        names: parameters, or members of them, and balance biases to read.
        verify_hash: compare the files' SHA-256 with `init_sha256`, which reads all of them.

    Raises:
        InitError: they do not fit the decoder, or are not those that `init_sha256` promises.
    """
    from safetensors import safe_open

    path = Path(str(config.init))
    check_init(config)
    if verify_hash and config.init_sha256 is not None and content_sha256(path) != config.init_sha256:
        raise InitError(f"{path} has changed since the run was made (its SHA-256 differs)")
    in_files = {ours: name for ours, name in _names_in(config, _shapes(path)).items() if ours in names}
    read: dict[str, Tensor] = {}
    for file in _files(path):
        with safe_open(file, framework="pt") as opened:
            present = set(opened.keys())
            read |= {ours: opened.get_tensor(name) for ours, name in in_files.items() if name in present}
    for name in read:
        if (factor := factor_in_plain_decoder(config, name)) != 1:
            read[name] = read[name] / factor
    return read
