"""A run's data set: prepared shards, another project's shards, or plain text. Imports no torch."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from stages.config import DataConfig
from stages.data.foreign_formats import find_shards, read_shards
from stages.data.integrity import check_shards, checksums_of
from stages.data.prepared import MANIFEST, UNFINISHED, Prepared, read_prepared
from stages.data.shards import DataError, Shard, count
from stages.data.text_cache import prepare_text

BYTE_VALUES = 256

__all__ = ["Corpus", "DataError", "cache_folder", "find_corpus", "prepare", "vocabulary"]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The token shards of a data set and its statistics."""

    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]
    bytes_per_token: float | None
    """Mean over the validation text; None where the shards' format does not record it."""
    unigram_bits_per_byte: float | None
    """Entropy of the validation text's bytes, the best that a model without context can reach; or None."""
    sha256: str
    """Of the tokens of both splits; identifies the corpus independent of its path."""


def find_corpus(config: DataConfig, *, cache: Path | None = None, spare: Path | None = None) -> Corpus:
    """The corpus at the configured path, of any format; text is split and cached the first time.

    Args:
        config: path, and share to hold out.
        cache: folder for split text; default: the user's cache folder.
        spare: folder to use if the cache cannot be written.

    Raises:
        DataError: there is no data, or it is damaged.
    """
    where = config.path or "the Python standard library"
    try:
        return _open(config, cache=cache or cache_folder(), spare=spare)
    except OSError as error:
        raise DataError(f"{error.filename or where} cannot be read ({error.strerror})") from error


def prepare(config: DataConfig, *, cache: Path | None = None, spare: Path | None = None) -> Corpus:
    """The corpus to train on: `find_corpus`, checked against the configuration.

    Raises:
        DataError: see `find_corpus`; or its hash is not `config.sha256`; or a split is shorter than a
            sequence.
    """
    corpus = find_corpus(config, cache=cache, spare=spare)
    where = config.path or "the Python standard library"
    if config.sha256 is not None and config.sha256 != corpus.sha256:
        raise DataError(
            f"{where} holds other data than the run was made for: its SHA-256 is {corpus.sha256}, the run's "
            f"{config.sha256}; put the data back, say where it lies now (`asyncpp data moved`), or sweep "
            "into a new folder"
        )
    for split, shards in (("train", corpus.train), ("validation", corpus.validation)):
        if (tokens := count(shards)) < config.context + 1:
            raise DataError(
                f"the {split} split of {where} has {tokens} tokens, one sequence needs {config.context + 1}"
            )
    return corpus


def vocabulary(config: DataConfig, *, cache: Path | None = None) -> int:
    """The smallest `model.vocab_size` that the data can be trained with.

    Token shards are read completely the first time, and checked against their checksums.

    Raises:
        DataError: see `prepare`; or a shard does not match its manifest.
    """
    cache = cache or cache_folder()
    corpus = prepare(config, cache=cache)
    path = _path(config)
    shards = [*corpus.train, *corpus.validation]
    if path is not None and is_prepared(path):
        prepared = read_prepared(path)
        check_shards(shards, checksums=prepared.checksums, vocab_size=prepared.vocab_size, cache=cache)
        return prepared.vocab_size
    if path is not None and find_shards(path):
        return 1 + check_shards(shards, checksums={}, vocab_size=None, cache=cache)
    return BYTE_VALUES


def is_prepared(path: Path) -> bool:
    """Whether `asyncpp data prepare` wrote this folder.

    Raises:
        DataError: it has not finished.
    """
    if (path / MANIFEST).is_file():
        return True
    if (path / UNFINISHED).is_dir():
        raise DataError(f"{path} is not completely prepared: run `asyncpp data prepare` again to continue")
    return False


def cache_folder() -> Path | None:
    """Folder for cached data: ASYNCPP_CACHE, or below XDG_CACHE_HOME or ~/.cache; None without a home."""
    if os.environ.get("ASYNCPP_CACHE"):
        return Path(os.environ["ASYNCPP_CACHE"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "asyncpp"
    try:
        return Path.home() / ".cache" / "asyncpp"
    except RuntimeError:
        return None


def _path(config: DataConfig) -> Path | None:
    if config.path is None:
        return None
    try:
        return Path(config.path).expanduser()
    except RuntimeError as error:
        raise DataError(f"{config.path} does not exist ({error})") from error


def _open(config: DataConfig, *, cache: Path | None, spare: Path | None) -> Corpus:
    path = _path(config)
    if path is not None and is_prepared(path):
        return _of_prepared(read_prepared(path))
    if path is not None and (files := find_shards(path)):
        return _of_shards(tuple(files), config.validation_share, cache=cache)
    text = prepare_text(config, cache=cache, spare=spare)
    return Corpus(
        train=(Shard(file=text.file("train"), dtype="uint8", tokens=text.train_tokens),),
        validation=(Shard(file=text.file("validation"), dtype="uint8", tokens=text.validation_tokens),),
        bytes_per_token=text.bytes_per_token,
        unigram_bits_per_byte=text.unigram_bits_per_byte,
        sha256=text.sha256,
    )


def _of_prepared(prepared: Prepared) -> Corpus:
    digest = hashlib.sha256()
    for split, shards in prepared.splits.items():
        for shard in shards:
            place = f"{split}:{shard.first}:{shard.tokens}:{prepared.checksums[shard.file]}\n"
            digest.update(place.encode())
    return Corpus(
        train=prepared.splits["train"],
        validation=prepared.splits["validation"],
        bytes_per_token=prepared.bytes_per_token,
        unigram_bits_per_byte=prepared.unigram_bits_per_byte,
        sha256=digest.hexdigest(),
    )


def _of_shards(files: tuple[Path, ...], validation_share: float, *, cache: Path | None) -> Corpus:
    splits = read_shards(files, validation_share=validation_share)
    checksums = checksums_of([*splits.train, *splits.validation], cache=cache)
    digest = hashlib.sha256()
    for split, shards in (("train", splits.train), ("validation", splits.validation)):
        for shard in shards:
            place = (
                f"{split}:{shard.dtype}:{shard.header}:{shard.first}:{shard.tokens}:{checksums[shard.file]}\n"
            )
            digest.update(place.encode())
    return Corpus(
        train=splits.train,
        validation=splits.validation,
        bytes_per_token=None,
        unigram_bits_per_byte=None,
        sha256=digest.hexdigest(),
    )
