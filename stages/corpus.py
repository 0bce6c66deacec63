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
from stages.shard_check import check_shards, checksums_of
from stages.shards import DataError, Shard, count
from stages.text_cache import prepare_text

BYTE_VALUES = 256

__all__ = ["Corpus", "DataError", "cache_folder", "find_corpus", "prepare", "vocabulary"]


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
    """Of the tokens of both splits: it tells corpora apart, wherever they lie."""
    earlier_sha256: str | None = None
    """What runs before asyncpp 0.2 wrote for the same data, where that was another."""

    def is_called(self, sha256: str) -> bool:
        """Whether this is the corpus that a run names."""
        return sha256 in (self.sha256, self.earlier_sha256)


def find_corpus(config: DataConfig, *, cache: Path | None = None, spare: Path | None = None) -> Corpus:
    """The corpus that lies where the configuration says, whatever it is; text is split the first time.

    Args:
        config: where, and how much of it to hold out.
        cache: folder for what is made of text; the user's cache folder unless given.
        spare: the folder to take where the cache cannot be written.

    Raises:
        DataError: there is no data, or it is damaged.
    """
    where = config.path or "the Python standard library"
    try:
        return _open(config, cache=cache or cache_folder(), spare=spare)
    except OSError as error:
        raise DataError(f"{error.filename or where} cannot be read ({error.strerror})") from error


def prepare(config: DataConfig, *, cache: Path | None = None, spare: Path | None = None) -> Corpus:
    """The corpus that the configuration names, to train on. As `find_corpus`, and

    Raises:
        DataError: it is not the one of `config.sha256`, or too little of it for one sequence a split.
    """
    corpus = find_corpus(config, cache=cache, spare=spare)
    where = config.path or "the Python standard library"
    if config.sha256 is not None and not corpus.is_called(config.sha256):
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

    Token shards are read whole the first time, and held against their checksums.

    Raises:
        DataError: as `prepare`; or a shard is not what its manifest says.
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
    """Whether a folder is one that `asyncpp data prepare` has written.

    Raises:
        DataError: it has begun to.
    """
    if (path / MANIFEST).is_file():
        return True
    if (path / UNFINISHED).is_dir():
        raise DataError(f"{path} is not prepared to the end: give `asyncpp data prepare` once more to go on")
    return False


def cache_folder() -> Path | None:
    """Where prepared text is kept: below ASYNCPP_CACHE, XDG_CACHE_HOME or ~/.cache; None without a home."""
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
        earlier_sha256=_of_samples(files, validation_share),
    )


def _of_samples(files: tuple[Path, ...], validation_share: float) -> str:
    """Of names, sizes, beginnings and ends: what told other projects' shards apart once."""
    digest = hashlib.sha256(f"{validation_share}".encode())
    for file in files:
        with file.open("rb") as opened:
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}\n".encode(errors="surrogateescape"))
            digest.update(opened.read(_SAMPLE))
            opened.seek(max(0, size - _SAMPLE))
            digest.update(opened.read())
    return digest.hexdigest()


_SAMPLE = 1 << 16
