"""A run's data set: prepared shards, another project's shards, or plain text. Imports no torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from stages.config.keys import LARGEST
from stages.config.run_config import OWN_SPLIT, DataConfig
from stages.data.foreign_formats import find_shards, held_out_files, read_shard, read_shards
from stages.data.integrity import check_shards, checksums_of
from stages.data.prepared import MANIFEST, Prepared, read_prepared
from stages.data.shards import DataError, Shard, count
from stages.data.text import prepare_text

BYTE_VALUES = 256

__all__ = [
    "Corpus",
    "DataError",
    "HeldOut",
    "Source",
    "cache_folder",
    "find_corpus",
    "find_validation_set",
    "prepare",
    "tokenizer_of",
    "vocabulary",
]


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A validation set."""

    shards: tuple[Shard, ...]
    bytes_per_token: float | None
    """Mean over its text; None where the shards' format does not record it."""
    unigram_bits_per_byte: float | None
    """Entropy of its bytes, the best that a model without context can reach; or None."""
    sha256: str
    """Hash of its tokens; independent of its path."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A part of a mixture (`data.sources`)."""

    name: str
    share: float
    """Share of the sequences that are trained on, 0..1."""
    tokens: int
    """Tokens in its train split."""


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
    """Hash of the tokens of both splits; identifies the corpus independent of its path."""
    sets: Mapping[str, HeldOut] = field(default_factory=dict)
    """Further validation sets, by name."""
    end_of_document: int | None = None
    """Token that ends each document; None if it is not known."""
    sources: tuple[Source, ...] = ()
    """Parts of a mixture, in the order in which `train` and `validation` have their splits."""

    def shards(self) -> list[Shard]:
        """All shards that a run reads."""
        sets = (shard for held_out in self.sets.values() for shard in held_out.shards)
        return [*self.train, *self.validation, *sets]

    def held_out(self, name: str) -> HeldOut:
        """A validation set; `OWN_SPLIT` names that of the corpus itself."""
        if name != OWN_SPLIT:
            return self.sets[name]
        return HeldOut(
            shards=self.validation,
            bytes_per_token=self.bytes_per_token,
            unigram_bits_per_byte=self.unigram_bits_per_byte,
            sha256=self.sha256,
        )


def find_corpus(config: DataConfig, *, cache: Path | None = None, spare: Path | None = None) -> Corpus:
    """The corpus at the configured path, of any format; text is split and cached the first time.

    Args:
        config: path, and share to hold out.
        cache: folder for split text; default: the user's cache folder.
        spare: folder to use if the cache cannot be written.

    Raises:
        DataError: there is no data, or it is damaged.
    """
    if config.sources:
        return _mixture(config, cache=cache, spare=spare)
    where = where_of(config)
    try:
        return _open(config, cache=cache or cache_folder(), spare=spare)
    except OSError as error:
        raise DataError(f"{error.filename or where} cannot be read ({error.strerror})") from error


def prepare(config: DataConfig, *, cache: Path | None = None, spare: Path | None = None) -> Corpus:
    """The corpus to train on, with the validation sets: `find_corpus`, checked against the configuration.

    Raises:
        DataError: see `find_corpus`; or a hash is not that of the configuration; or a split is shorter than
            a sequence.
    """
    corpus = find_corpus(config, cache=cache, spare=spare)
    where = where_of(config)
    _check_sha256(where, corpus.sha256, wanted=config.sha256)
    if not corpus.sources:
        _check_length(f"the train split of {where}", count(corpus.train), config)
    for source in corpus.sources:
        with _named(f"data.sources.{source.name}"):
            _check_length(f"the train split of {config.sources[source.name]}", source.tokens, config)
    _check_length(f"the validation split of {where}", count(corpus.validation), config)
    sets = {}
    for name, path in config.validation.items():
        with _named(f"data.validation.{name}"):
            held_out = find_validation_set(path, dtype=config.dtype, cache=cache, spare=spare)
            sets[name] = held_out
            _check_sha256(path, held_out.sha256, wanted=config.validation_sha256.get(name))
            _check_length(path, count(held_out.shards), config)
    return replace(corpus, sets=sets)


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Within this context, what is wrong with data is said of this key."""
    try:
        yield
    except DataError as error:
        error.key = key
        raise


def _check_sha256(where: str, sha256: str, *, wanted: str | None) -> None:
    if wanted not in (None, sha256):
        raise DataError(
            f"{where} holds other data than the run was made for: its SHA-256 is {sha256}, the run's "
            f"{wanted}; put the data back, say where it lies now (`asyncpp data moved`), or sweep "
            "into a new folder"
        )


def _check_length(where: str, tokens: int, config: DataConfig) -> None:
    if tokens < config.context + 1:
        raise DataError(f"{where} has {tokens} tokens, one sequence needs {config.context + 1}")


def find_validation_set(
    path: str, *, dtype: str = "auto", cache: Path | None = None, spare: Path | None = None
) -> HeldOut:
    """The validation set at a path: of prepared data its validation split; of token shards those that are
    held out by their name, if there are any; otherwise everything.

    Args:
        path: of data in any format.
        dtype: see `DataConfig`.
        cache: see `find_corpus`.
        spare: see `find_corpus`.

    Raises:
        DataError: there is no data, or it is damaged.
    """
    # A share of 1 holds out every text file.
    whole = DataConfig(path=path, validation_share=1.0, dtype=dtype)
    folder = _path(whole)
    assert folder is not None
    try:
        if is_prepared(folder) or not (files := find_shards(folder)):
            return find_corpus(whole, cache=cache, spare=spare).held_out(OWN_SPLIT)
        shards = tuple(read_shard(file, dtype=dtype) for file in held_out_files(files) or files)
        sha256 = _sha256_of({"validation": shards}, cache=cache or cache_folder())
        return HeldOut(shards=shards, bytes_per_token=None, unigram_bits_per_byte=None, sha256=sha256)
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read ({error.strerror})") from error


def tokenizer_of(path: str | None) -> str | None:
    """What tells the tokenizers of two data sets apart; None where it is unknown, as of others' shards.

    Raises:
        DataError: the data cannot be read.
    """
    folder = _path(DataConfig(path=path))
    if folder is not None and is_prepared(folder):
        prepared = read_prepared(folder)
        return f"{prepared.tokenizer_sha256 or 'bytes'} {prepared.start_of_document}"
    return None if folder is not None and find_shards(folder) else "bytes None"


def vocabulary(config: DataConfig, *, cache: Path | None = None) -> int:
    """The smallest `model.vocab_size` that the data, with the validation sets, can be trained with.

    Token shards are read completely the first time, and checked against their checksums.

    Raises:
        DataError: see `prepare`; or a shard does not match its manifest.
    """
    cache = cache or cache_folder()
    corpus = prepare(config, cache=cache)
    needed = []
    if not corpus.sources:
        needed.append(_vocabulary(_path(config), [*corpus.train, *corpus.validation], cache=cache))
    for name, source in _sources(config).items():
        with _named(f"data.sources.{name}"):
            alone = find_corpus(source, cache=cache)
            needed.append(_vocabulary(_path(source), [*alone.train, *alone.validation], cache=cache))
    for name, held_out in corpus.sets.items():
        path = _path(DataConfig(path=config.validation[name]))
        needed.append(_vocabulary(path, held_out.shards, cache=cache))
    return max(needed)


def _vocabulary(path: Path | None, shards: Sequence[Shard], *, cache: Path | None) -> int:
    if path is not None and is_prepared(path):
        prepared = read_prepared(path)
        check_shards(shards, checksums=prepared.checksums, vocab_size=prepared.vocab_size, cache=cache)
        return prepared.vocab_size
    if path is not None and find_shards(path):
        return 1 + check_shards(shards, checksums={}, vocab_size=None, cache=cache)
    return BYTE_VALUES


def recorded_end_of_document(config: DataConfig) -> int | None:
    """The token that ends a document, as the data, or a source of it, records it; only prepared data does.

    Raises:
        DataError: see `find_corpus`.
    """
    folders = [_path(DataConfig(path=path)) for path in config.trained_paths.values()]
    recorded = (read_prepared(folder).end_of_document for folder in folders if folder and is_prepared(folder))
    return next(recorded, None)


def tokenizer_folder(config: DataConfig) -> Path | None:
    """Where to look for the tokenizer: the data, or of a mixture a source that records one, if any does."""
    folders = [Path(path) for path in config.trained_paths.values()]
    return next(filter(is_prepared, folders), folders[0] if folders else None)


def is_prepared(path: Path) -> bool:
    """Whether `asyncpp data prepare` wrote this folder."""
    return (path / MANIFEST).is_file()


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


def where_of(config: DataConfig) -> str:
    """The data that is trained on, as messages name it."""
    return ", ".join(config.trained_paths.values()) or "the Python standard library"


def _path(config: DataConfig) -> Path | None:
    if config.path is None:
        return None
    try:
        return Path(config.path).expanduser()
    except RuntimeError as error:
        raise DataError(f"{config.path} does not exist ({error})") from error


def _sources(config: DataConfig) -> dict[str, DataConfig]:
    """For each source of a mixture, in the order of their names, the data that is it alone."""
    alone = replace(config, sources={}, weights={})
    return {name: replace(alone, path=path) for name, path in sorted(config.sources.items())}


def _mixture(config: DataConfig, *, cache: Path | None, spare: Path | None) -> Corpus:
    """The splits of all sources, one after the other."""
    corpora = {}
    for name, source in _sources(config).items():
        with _named(f"data.sources.{name}"):
            corpora[name] = find_corpus(source, cache=cache, spare=spare)
    weights = {name: config.weights.get(name, 1.0) for name in corpora}
    for name, weight in weights.items():
        if not 0 < weight <= LARGEST:
            with _named(f"data.weights.{name}"):
                raise DataError(f"is {weight:g}; accepted: above 0, at most {LARGEST:g}")
    ends = {corpus.end_of_document for corpus in corpora.values()} - {None}
    if len(ends) > 1:
        raise DataError(f"{where_of(config)} end documents with different tokens")
    digest = hashlib.sha256()
    for name, corpus in corpora.items():
        digest.update(f"{name}:{corpus.sha256}\n".encode())
    return Corpus(
        train=tuple(shard for corpus in corpora.values() for shard in corpus.train),
        validation=tuple(shard for corpus in corpora.values() for shard in corpus.validation),
        bytes_per_token=_mean_bytes_per_token(list(corpora.values())),
        unigram_bits_per_byte=None,
        sha256=digest.hexdigest(),
        end_of_document=next(iter(ends), None),
        sources=tuple(
            Source(name=name, share=weights[name] / sum(weights.values()), tokens=count(corpus.train))
            for name, corpus in corpora.items()
        ),
    )


def _mean_bytes_per_token(corpora: Sequence[Corpus]) -> float | None:
    """Mean over the validation text of all corpora; None where one does not record it, or there is none."""
    tokens = [count(corpus.validation) for corpus in corpora]
    means = [corpus.bytes_per_token for corpus in corpora if corpus.bytes_per_token is not None]
    if len(means) < len(corpora) or not sum(tokens):
        return None
    return sum(mean * number for mean, number in zip(means, tokens, strict=True)) / sum(tokens)


def _open(config: DataConfig, *, cache: Path | None, spare: Path | None) -> Corpus:
    path = _path(config)
    if path is not None and is_prepared(path):
        return _of_prepared(read_prepared(path))
    if path is not None and (files := find_shards(path)):
        return _of_shards(tuple(files), config, cache=cache)
    text = prepare_text(config, cache=cache, spare=spare)
    return Corpus(
        train=(Shard(file=text.file("train"), dtype="uint8", tokens=text.train_tokens),),
        validation=(Shard(file=text.file("validation"), dtype="uint8", tokens=text.validation_tokens),),
        bytes_per_token=text.bytes_per_token,
        unigram_bits_per_byte=text.unigram_bits_per_byte,
        sha256=text.sha256,
        end_of_document=config.end_of_document,
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
        end_of_document=prepared.end_of_document,
    )


def _of_shards(files: tuple[Path, ...], config: DataConfig, *, cache: Path | None) -> Corpus:
    splits = read_shards(files, validation_share=config.validation_share, dtype=config.dtype)
    return Corpus(
        train=splits.train,
        validation=splits.validation,
        bytes_per_token=None,
        unigram_bits_per_byte=None,
        sha256=_sha256_of({"train": splits.train, "validation": splits.validation}, cache=cache),
        end_of_document=config.end_of_document,
    )


def _sha256_of(splits: Mapping[str, Sequence[Shard]], *, cache: Path | None) -> str:
    """Hash of the tokens of another project's shards, by split."""
    checksums = checksums_of([shard for shards in splits.values() for shard in shards], cache=cache)
    digest = hashlib.sha256()
    for split, shards in splits.items():
        for shard in shards:
            place = (
                f"{split}:{shard.dtype}:{shard.header}:{shard.first}:{shard.tokens}:{checksums[shard.file]}\n"
            )
            digest.update(place.encode())
    return digest.hexdigest()
