"""Initial weights from safetensors, under our own names or those of transformers. Imports no torch.

`model.init` names a file, or a folder with `model.safetensors` or an index of several files, as
`asyncpp export` and `transformers` write them. The hash of its content, `model.init_sha256`, is part of the
run's identity; its path is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stages.config.records import DamagedError, read_bytes
from stages.config.run_config import ModelConfig
from stages.shape.families import describe
from stages.shape.hf_config import config_differences, family_difference
from stages.shape.moe import BIAS
from stages.shape.moe_hugging_face import NoClassError
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
        named = _json(index).get("weight_map")
        names = list(named.values()) if isinstance(named, dict) else []
        if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise InitError(f"{index} names no files beside it")
        files = [path / name for name in sorted(set(names))]
        if missing := [file for file in files if not file.is_file()]:
            raise InitError(f"{index} names {missing[0].name!r}, which is no file beside it")
        if WEIGHTS_FILE not in names and (path / WEIGHTS_FILE).is_file():
            # transformers would read that, and not the files of the index.
            raise InitError(f"{path} holds {WEIGHTS_FILE}, and {INDEX_FILE} of others; accepted: one of them")
        return files
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
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        except OSError as error:
            raise InitError(f"{file} cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def check_init(config: ModelConfig) -> None:
    """Check that `config.init` fits the decoder, by names, shapes, types and config.json; reads no weights.

    Raises:
        InitError: says which weight or setting does not fit.
    """
    path = Path(str(config.init))
    description = _description(path)
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
    weights = _weights(path)
    names = _names_in(config, weights)
    wanted = {names[parameter.name]: parameter.shape for parameter in _tensors(config)}
    biases = {file_name for name, file_name in names.items() if name.endswith(BIAS)}
    if (head := _head(weights)) is not None:
        wanted[head] = wanted[names["embedding.weight"]]
    for name, shape in wanted.items():
        if name not in weights:
            if name in biases:
                continue  # It begins as 0.
            raise InitError(f"{path} has no {name}")
        file, given, dtype = weights[name]
        if given != shape:
            raise InitError(f"{file}: {name} is {list(given)}, the model {config.name} has {list(shape)}")
        if dtype not in EXPONENTS:
            raise InitError(f"{file}: {name} is of type {dtype}; accepted: {', '.join(EXPONENTS)}")
    unknown = sorted(
        name
        for name in weights.keys() - wanted.keys()
        if not name.endswith("rotary_emb.inv_freq") and 0 not in weights[name].shape
    )
    if unknown:
        file = weights[unknown[0]].file
        raise InitError(f"{file} has {unknown[0]}, which the model {config.name} has no place for")
    if differences:
        raise InitError(f"{description}: {differences[0]}")


def check_values(config: ModelConfig) -> None:
    """Check that all weights for this decoder are finite, and that a tied head is the embedding; reads them.

    Raises:
        InitError: names the first weight that is not so, and its file.
    """
    path = Path(str(config.init))
    weights = _weights(path)
    names = _names_in(config, weights)
    head, embedding = _head(weights), names["embedding.weight"]
    for file in _files(path):
        for name in _not_finite(file):
            if name in (head, *names.values()):
                raise InitError(f"{file}: {name} has values that are not finite")
    description = _description(path)
    tied = config.tied or (description.is_file() and _json(description).get("tie_word_embeddings") is True)
    if head is None or not tied:
        return
    both = [(weights[name].file, name) for name in (head, embedding)]
    if weights[head][1:] != weights[embedding][1:] or not _equal(*both):
        raise InitError(f"{weights[head].file}: {head} differs from {embedding}; tied, they are one")


def _head(content: Collection[str]) -> str | None:
    """Name of the head in the files, if there is one: of a tied model it is the embedding once more."""
    head = "lm_head.weight" if "model.embed_tokens.weight" in content else "head.weight"
    return head if head in content else None


EXPONENTS = {
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
"""By name in safetensors of each type that weights may have: an integer type of its size, and the bits of it
that are all set where a value is not finite."""
_BLOCK = 1 << 22
"""Values to look at at once."""


def _equal(first: tuple[Path, str], second: tuple[Path, str]) -> bool:
    """Whether two weights of one size are the same, bit for bit."""
    blocks = (_blocks(_as_integers(file)[name]) for file, name in (first, second))
    return all(map(np.array_equal, *blocks))


def _not_finite(file: Path) -> list[str]:
    """Names of the file's weights with values that are infinite or no numbers."""
    types = {name: weight.dtype for name, weight in _weights(file).items()}
    wrong = []
    for name, values in _as_integers(file).items():
        _, bits = EXPONENTS[types[name]]
        if any(((block & bits) == bits).any() for block in _blocks(values)):
            wrong.append(name)
    return wrong


def _as_integers(file: Path) -> dict[str, np.ndarray]:
    """The weights of the types of `EXPONENTS`, mapped; numpy has no type for some of them."""
    raw = np.memmap(file, np.uint8, mode="r")
    begin = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    header = json.loads(raw[8:begin].tobytes())
    return {
        name: raw[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]].view(
            EXPONENTS[entry["dtype"]][0]
        )
        for name, entry in header.items()
        # Beside the tensors there may be metadata: text by any name, or null.
        if name != "__metadata__" and entry["dtype"] in EXPONENTS
    }


def _blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    return (values[first : first + _BLOCK] for first in range(0, len(values), _BLOCK))


def _description(path: Path) -> Path:
    return (path if path.is_dir() else path.parent) / CONFIG_FILE


def _tensors(config: ModelConfig) -> Iterator[Parameter]:
    """Members of all parameters, and the balance biases."""
    spec = describe(config)
    for parameter in spec.whole():
        yield from parameter.members()
    yield from spec.biases()


class _Weight(NamedTuple):
    """A weight as its file describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def _weights(path: Path) -> dict[str, _Weight]:
    """What the files hold, by name."""
    from safetensors import SafetensorError, safe_open

    weights: dict[str, _Weight] = {}
    for file in _files(path):
        try:
            with safe_open(file, framework="np") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                own = {
                    name: _Weight(file, tuple(part.get_shape()), part.get_dtype())
                    for name, part in slices.items()
                }
        except (OSError, SafetensorError) as error:
            raise InitError(f"{file} is not safetensors ({error})") from error
        if twice := sorted(own.keys() & weights.keys()):
            raise InitError(f"{file} has {twice[0]}, and so has {weights[twice[0]].file.name}")
        weights |= own
    return weights


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
        verify_hash: check all values (`check_values`), and compare the files' SHA-256 with `init_sha256`.

    Raises:
        InitError: they do not fit the decoder, or are not those that `init_sha256` promises.
    """
    from safetensors import safe_open

    path = Path(str(config.init))
    check_init(config)
    if verify_hash:
        check_values(config)
    if verify_hash and config.init_sha256 is not None and content_sha256(path) != config.init_sha256:
        raise InitError(f"{path} has changed since the run was made (its SHA-256 differs)")
    in_files = {ours: name for ours, name in _names_in(config, _weights(path)).items() if ours in names}
    read: dict[str, Tensor] = {}
    for file in _files(path):
        with safe_open(file, framework="pt") as opened:
            present = set(opened.keys())
            read |= {ours: opened.get_tensor(name) for ours, name in in_files.items() if name in present}
    for name in read:
        if (factor := factor_in_plain_decoder(config, name)) != 1:
            read[name] = read[name] / factor
    return read
