"""The data that a run trains on, whatever form it has: prepared, another project's shards, or plain text.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from stages.config import DataConfig
from stages.foreign_shards import find_shards, read_shards
from stages.prepared import MANIFEST, UNFINISHED, Prepared, read_prepared
from stages.shard_check import check_shards
from stages.shards import DataError, Shard, count
from stages.text import prepare_text, text_files

BYTE_VALUES = 256

__all__ = ["Corpus", "DataError", "cache_folder", "prepare", "vocabulary"]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Token shards on disk and what is known of them."""

    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]
    bytes_per_token: float | None
    """Of validation text, on average; None where the shards' format does not say it."""
    unigram_bits_per_byte: float | None
    """Entropy of the validation text's single bytes, all that a model without context can reach; or None."""
    sha256: str
    """Tells corpora apart. Of everything; of names, sizes, beginnings and ends where a format has no
    checksums."""


def prepare(config: DataConfig, *, cache: Path | None = None) -> Corpus:
    """The corpus that the configuration names; plain text is split into bytes the first time.

    Args:
        config: which data, and how much of it to hold out.
        cache: folder for what is made of text; the user's cache folder unless given.

    Raises:
        DataError: there is no data, it is damaged, or too little of it for one sequence a split.
    """
    corpus = _open(config, cache=cache or cache_folder())
    for split, shards in (("train", corpus.train), ("validation", corpus.validation)):
        if (tokens := count(shards)) < config.context + 1:
            where = config.path or "the Python standard library"
            raise DataError(
                f"the {split} split of {where} has {tokens} tokens, one sequence needs {config.context + 1}"
            )
    return corpus


def vocabulary(config: DataConfig, *, cache: Path | None = None) -> int:
    """The smallest `model.vocab_size` that the data can be trained with.

    Token shards are read whole the first time, and held against their checksums.

    Raises:
        DataError: as `prepare`, except that text is not split for it; or a shard is not what its manifest
            says.
    """
    path = _path(config)
    folder = cache or cache_folder()
    if path is not None and is_prepared(path):
        prepare(config, cache=folder)
        prepared = read_prepared(path)
        shards = [shard for of_split in prepared.splits.values() for shard in of_split]
        check_shards(shards, checksums=prepared.checksums, vocab_size=prepared.vocab_size, cache=folder)
        return prepared.vocab_size
    if path is not None and find_shards(path):
        corpus = prepare(config, cache=folder)
        shards = [*corpus.train, *corpus.validation]
        return 1 + check_shards(shards, checksums={}, vocab_size=None, cache=folder)
    text_files(config)
    return BYTE_VALUES


def is_prepared(path: Path) -> bool:
    """Whether a folder is one that `asyncpp data prepare` has written.

    Raises:
        DataError: it has begun to.
    """
    if (path / MANIFEST).is_file():
        return True
    if (path / UNFINISHED).is_dir():
        raise DataError(f"{path} is not prepared to the end: give `asyncpp data prepare` once more to go on")
    return False


def cache_folder() -> Path:
    """Where prepared text is kept: below ASYNCPP_CACHE, XDG_CACHE_HOME or ~/.cache."""
    if "ASYNCPP_CACHE" in os.environ:
        return Path(os.environ["ASYNCPP_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "asyncpp"


def _path(config: DataConfig) -> Path | None:
    return None if config.path is None else Path(config.path).expanduser()


def _open(config: DataConfig, *, cache: Path) -> Corpus:
    path = _path(config)
    if path is not None and is_prepared(path):
        return _of_prepared(read_prepared(path))
    if path is not None and (files := find_shards(path)):
        return _of_shards(tuple(files), config.validation_share)
    text = prepare_text(config, cache=cache)
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


def _of_shards(files: tuple[Path, ...], validation_share: float) -> Corpus:
    splits = read_shards(files, validation_share=validation_share)
    digest = hashlib.sha256(f"{validation_share}".encode())
    for file in files:
        with file.open("rb") as opened:
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}\n".encode())
            digest.update(opened.read(_SAMPLE))
            opened.seek(max(0, size - _SAMPLE))
            digest.update(opened.read())
    return Corpus(
        train=splits.train,
        validation=splits.validation,
        bytes_per_token=None,
        unigram_bits_per_byte=None,
        sha256=digest.hexdigest(),
    )


_SAMPLE = 1 << 16
