"""Fixes in a configuration what may change around it: full paths, and hashes of data, code and weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncpp_cli.base.console import say
from asyncpp_cli.base.errors import UserError
from stages.config.run_config import ModelConfig, RunConfig, changed


def _full(path: str) -> str:
    return str(Path(path).expanduser().absolute())


class Pins:
    """Puts hashes into the configurations of cells; each file is read once, however many cells use it.

    Args:
        source: the template, for messages.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._weights: dict[str, str] = {}
        self._corpora: dict[tuple[Any, ...], str] = {}
        self._code: dict[tuple[Any, ...], dict[str, str]] = {}
        self._vocabularies: dict[tuple[Any, ...], int] = {}

    def with_full_paths(self, config: RunConfig) -> RunConfig:
        """With full paths, as a job may start in another working folder, and the hash of initial weights.

        Raises:
            UserError: the initial weights cannot be read, or are not those that the configuration names.
        """
        data = config.data
        data = replace(
            data,
            path=None if data.path is None else _full(data.path),
            sources={name: _full(path) for name, path in data.sources.items()},
            weights={**dict.fromkeys(data.sources, 1.0), **data.weights},
            validation={name: _full(path) for name, path in data.validation.items()},
        )
        model = config.model if config.model.init is None else self._with_initial_weights(config.model)
        return replace(config, data=data, model=model)

    def _with_initial_weights(self, model: ModelConfig) -> ModelConfig:
        from stages.checkpoint.initial_weights import InitError, content_sha256

        path = _full(str(model.init))
        try:
            if path not in self._weights:
                self._weights[path] = content_sha256(Path(path))
        except InitError as error:
            raise UserError(f"{self._source}: model.init: {error}") from error
        checksum = self._weights[path]
        if model.init_sha256 not in (None, checksum):
            raise UserError(f"{self._source}: model.init_sha256: {path} holds other weights ({checksum})")
        return replace(model, init=path, init_sha256=checksum)

    def pinned(self, config: RunConfig, *, own_vocabulary: bool) -> RunConfig:
        """The configuration with all hashes, and with the vocabulary that its data needs.

        Args:
            config: of a cell.
            own_vocabulary: whether the template sets the vocabulary.

        Raises:
            UserError: the template names another hash of its code or data.
        """
        config = self._with_data(self._with_code(config))
        has_vocabulary = own_vocabulary or config.model.init is not None
        return config if has_vocabulary else self._with_vocabulary(config)

    def _with_code(self, config: RunConfig) -> RunConfig:
        """With the hashes of the code of the user's own that the configuration names."""
        from stages.config.own_code import code_sha256, own_code

        key = (config.schedule.name, config.optimizer.name, config.model.factory)
        if key not in self._code:
            self._code[key] = {section: code_sha256(files) for section, files in own_code(config).items()}
        sections = ("schedule", "optimizer", "model")
        for section in sections:
            current = self._code[key].get(section)
            if getattr(config, section).code_sha256 not in (None, current):
                raise UserError(f"{self._source}: {section}.code_sha256: the code is now another ({current})")
        return changed(config, {f"{each}.code_sha256": self._code[key].get(each) for each in sections})

    def _with_data(self, config: RunConfig) -> RunConfig:
        """With the hashes of the data, unless it cannot be read: `check_cells` refuses it."""
        from stages.data.dataset import DataError, find_corpus, find_validation_set, where_of

        data, source = config.data, self._source
        if not 0 < data.validation_share < 1:
            return config
        key = (*data.trained_paths.items(), data.validation_share, data.dtype)
        try:
            if key not in self._corpora:
                self._corpora[key] = find_corpus(data).sha256
            for path in data.validation.values():
                if (path, data.dtype) not in self._corpora:
                    self._corpora[path, data.dtype] = find_validation_set(path, dtype=data.dtype).sha256
        except DataError:
            return config
        sha256 = self._corpora[key]
        if data.sha256 not in (None, sha256):
            raise UserError(f"{source}: data.sha256: {where_of(data)} holds other data ({sha256})")
        sets = {name: self._corpora[path, data.dtype] for name, path in data.validation.items()}
        if wrong := [name for name, known in data.validation_sha256.items() if sets.get(name) != known]:
            raise UserError(
                f"{source}: data.validation_sha256.{wrong[0]}: data.validation.{wrong[0]} holds other "
                f"data ({sets.get(wrong[0])})"
            )
        return replace(config, data=replace(data, sha256=sha256, validation_sha256=sets))

    def _with_vocabulary(self, config: RunConfig) -> RunConfig:
        """With the larger vocabulary that the data needs, if it needs one.

        A vocabulary that is larger than needed stays: it is part of a published shape.
        """
        from stages.data.dataset import DataError, vocabulary

        data, own = config.data, config.model.vocab_size
        key = (*data.trained_paths.items(), data.validation_share, data.context, *data.validation.values())
        if key not in self._vocabularies:
            try:
                self._vocabularies[key] = vocabulary(data)
            except (DataError, ValueError):
                self._vocabularies[key] = 0  # `check_cells` reports it
            if self._vocabularies[key] > own:
                needed = self._vocabularies[key]
                say(f"note: model.vocab_size is {needed}, as the data needs; {config.model.name} has fewer")
        return changed(config, {"model.vocab_size": max(own, self._vocabularies[key])})
