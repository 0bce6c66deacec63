"""Checks of a configuration's data: that it exists, and fits the model. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from stages.config.keys import unknown
from stages.config.limits import ConfigError
from stages.config.run_config import OWN_SPLIT, DataConfig, RunConfig, TrainConfig
from stages.data.dataset import (
    BYTE_VALUES,
    DataError,
    is_prepared,
    recorded_end_of_document,
    tokenizer_of,
    vocabulary,
    where_of,
)


def check_data(config: RunConfig, seen: dict[str, int | DataError]) -> None:
    """Check that the data exists, has the run's hash, and fits the model's vocabulary, and that it is known
    where documents end, if attention stays within them.

    Args:
        config: the run's configuration.
        seen: cache of the vocabulary sizes of data sets, kept from call to call.

    Raises:
        ConfigError: names the first invalid key, what is wrong and what is accepted.
    """
    data = config.data
    _check_sources(data)
    _check_validation_sets(config)
    key = repr(data)
    if key not in seen:
        try:
            seen[key] = vocabulary(data)
        except DataError as error:
            seen[key] = error
    needed = seen[key]
    if isinstance(needed, DataError):
        raise ConfigError(needed.key, str(needed))
    if config.model.vocab_size < needed:
        what = f"the data in {where_of(data)}" if needed != BYTE_VALUES else "text read as bytes"
        raise ConfigError(
            "model.vocab_size",
            f"is {config.model.vocab_size}, {what} needs {needed} or more",
        )
    _check_document_mask(config)


_SET_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")


def _check_sources(data: DataConfig) -> None:
    if data.sources and data.path is not None:
        raise ConfigError("data.path", "does not go with data.sources; accepted with it: null")
    for name in data.weights:
        if name not in data.sources:
            raise ConfigError(f"data.weights.{name}", f"data.sources has no {name}")
    tokenizers: dict[str, str] = {}
    for name, path in data.sources.items():
        key = f"data.sources.{name}"
        if not _SET_NAME.fullmatch(name):
            raise ConfigError(
                key, "accepted as a name: up to 40 letters, digits and underscores, a letter first"
            )
        try:
            tokenizer = tokenizer_of(path)
        except (DataError, RuntimeError) as error:
            raise ConfigError(key, str(error)) from error
        if tokenizer is not None:
            tokenizers[tokenizer] = path
        if len(tokenizers) > 1:
            other = min(tokenizers.values())
            raise ConfigError(
                key, f"{path} was made with another tokenizer, or start of documents, than {other}"
            )


def _check_validation_sets(config: RunConfig) -> None:
    data, train = config.data, config.train
    trained = data.trained_paths
    for name, path in data.validation.items():
        key = f"data.validation.{name}"
        if name == OWN_SPLIT or not _SET_NAME.fullmatch(name):
            raise ConfigError(
                key,
                "accepted as a name: up to 40 letters, digits and underscores, a letter first; not "
                f"{OWN_SPLIT}, the data's own split",
            )
        try:
            tokenizers = {tokenizer_of(each) for each in (path, *(trained.values() or (None,)))} - {None}
            whole = not is_prepared(Path(path).expanduser())
        except (DataError, RuntimeError) as error:
            raise ConfigError(key, str(error)) from error
        if len(tokenizers) > 1:
            other = "the data that is trained on"
            raise ConfigError(
                key, f"{path} was made with another tokenizer, or start of documents, than {other}"
            )
        for of_training, other in trained.items() if whole else ():
            if Path(path).resolve() == Path(other).resolve():
                raise ConfigError(key, f"{path} is trained on ({of_training}); accepted: data that is not")
    if extra := sorted(data.validation_sha256.keys() - data.validation.keys()):
        raise ConfigError(f"data.validation_sha256.{extra[0]}", f"data.validation has no {extra[0]}")
    if data.headline not in (sets := (OWN_SPLIT, *data.validation)):
        raise ConfigError("data.headline", unknown(data.headline, sets))
    if train.eval_tokens is not None and train.eval_microbatches != TrainConfig.eval_microbatches:
        raise ConfigError(
            "train.eval_microbatches",
            f"is {train.eval_microbatches}, and train.eval_tokens says how much is read; accepted: either",
        )


def _check_document_mask(config: RunConfig) -> None:
    """Check that it is known where documents end, if attention stays within them."""
    data = config.data
    if not data.document_mask:
        if data.end_of_document is not None:
            raise ConfigError(
                "data.end_of_document", "goes with data.document_mask: true; accepted without it: null"
            )
        return
    if config.model.factory is not None:
        raise ConfigError(
            "data.document_mask",
            "goes with the decoder: the blocks of model.factory take no mask; accepted with it: false",
        )
    recorded = recorded_end_of_document(data)
    if recorded is not None and data.end_of_document is not None:
        raise ConfigError(
            "data.end_of_document",
            f"is {data.end_of_document}, and {where_of(data)} records its own, {recorded}; accepted with it: "
            "null",
        )
    if recorded is None and data.end_of_document is None:
        raise ConfigError(
            "data.document_mask",
            f"{where_of(data)} does not record which token ends a document; accepted: false, or true with "
            "data.end_of_document, or with data from `asyncpp data prepare`",
        )
    if data.end_of_document is not None and data.end_of_document >= config.model.vocab_size:
        raise ConfigError(
            "data.end_of_document",
            f"is {data.end_of_document}, must be below model.vocab_size = {config.model.vocab_size}",
        )
