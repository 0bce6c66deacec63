"""Writes a run's weights, with the tokenizer of its data, as safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncpp_cli.base.console import say
from asyncpp_cli.base.errors import DamagedError, UserError
from asyncpp_cli.data.tokenizers import Bytes, Library, byte_tokenizer_json, library, recorded_text
from asyncpp_cli.experiment.run_data import config_to_train, owners_of
from asyncpp_cli.runs.run_folder import Run
from stages.checkpoint.export_options import ExportFormat, Weights
from stages.checkpoint.files import CheckpointError
from stages.config.run_config import RunConfig
from stages.config.torch_process import importing_torch
from stages.data.dataset import is_prepared, tokenizer_folder
from stages.data.foreign_formats import find_shards
from stages.data.prepared import read_prepared
from stages.data.shards import DataError


def export_run(
    run: Run,
    folder: Path,
    *,
    format: ExportFormat,
    weights: Weights,
    step: int | None,
) -> tuple[int, int]:
    """Write weights into an empty folder; returns the checkpoint's step and the number of values.

    Args:
        run: the run.
        folder: to write into.
        format: of the files.
        weights: those used for evaluation, or those of the pipeline.
        step: of the checkpoint; None: the newest that is whole.

    Raises:
        UserError: there is no such checkpoint, or the format does not have the run's model.
    """
    try:
        config = config_to_train(run)
        if run.saved_step is None:
            raise UserError(f"{run.folder} has no checkpoint yet: there are no weights to export")
        with importing_torch():
            from stages.checkpoint.export import write_weights
            from stages.checkpoint.saved_weights import newest_weights

        saved = newest_weights(run.checkpoints, config, step=step, owners=owners_of(run))
        start, end = _write_tokenizer(config, folder) if format is ExportFormat.HF else (None, None)
        count = write_weights(
            saved,
            config,
            folder,
            format=format,
            weights=weights,
            start_of_document=start,
            end_of_document=end,
        )
    except (DamagedError, CheckpointError) as error:
        raise UserError(str(error)) from error
    # safetensors makes files that only their owner can read.
    for file in folder.iterdir():
        file.chmod(0o666 & folder.stat().st_mode)
    return saved.step, count


def _write_tokenizer(config: RunConfig, folder: Path) -> tuple[int | None, int | None]:
    """Write the data's tokenizer next to the weights; returns the tokens that begin and end a document.

    None where documents have none, as in plain text, or the data is not available. The tokenizer of another
    project's token shards is unknown.

    Raises:
        UserError: transformers would read other tokens out of a text than those that were trained on.
    """
    path = None
    try:
        path = tokenizer_folder(config.data)
        prepared = read_prepared(path) if path is not None and is_prepared(path) else None
        foreign = prepared is None and path is not None and bool(find_shards(path))
        if path is not None and not path.exists():
            raise DataError(f"{path} does not exist")
        if prepared is not None and prepared.tokenizer_file is not None:
            trained = recorded_text(prepared)
        else:
            trained = byte_tokenizer_json()
    except (DataError, OSError, ValueError, UserError) as error:
        say(f"The tokenizer is left out: {error}")
        return None, None
    if foreign:
        say(f"The tokenizer is left out: {path} does not say which one made its tokens")
        return None, None
    start = None if prepared is None else prepared.start_of_document
    end = Bytes.end_of_document if prepared is None else prepared.end_of_document
    content, settings = for_transformers(trained, start=start, end=end)
    settings["model_max_length"] = config.data.context
    if difference := encoding_difference(trained, content, settings):
        raise UserError(
            f"transformers would read other tokens than those that were trained on: {difference}; "
            "accepted: --format safetensors"
        )
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return start, None if prepared is None else end


SAMPLE = "Two  foxes' tails, 3.14 of 12345 naïve cafés…\n\tdef f(x): return x ** 2\r\n 漢字 🙂 Ünïcode . end"
"""Text on which the tokens of both are compared."""


def for_transformers(trained: str, *, start: int | None, end: int) -> tuple[str, dict[str, Any]]:
    """The content of the tokenizer.json and the tokenizer_config.json of an export.

    `asyncpp data prepare` adds nothing to a document's own tokens but those given here, and neither cuts nor
    fills it: what the tokenizer's own file says of that is left out.

    Args:
        trained: content of the tokenizer.json that the data was prepared with.
        start: token that begins each document, if there is one.
        end: token that ends each document.
    """
    content: dict[str, Any] = json.loads(trained)
    content |= {"post_processor": None, "truncation": None, "padding": None}
    first, last = (None if token is None else _text_of(content, token) for token in (start, end))
    if first is not None:
        content["post_processor"] = _begins_with(first, start)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": first,
        # lm-eval pads with it, and starts every text with it that has no start of its own.
        "eos_token": last,
        "add_bos_token": first is not None,
        "add_eos_token": False,
        # transformers sets it in the tokenizer, to false where it is left out.
        "add_prefix_space": bool((content.get("pre_tokenizer") or {}).get("add_prefix_space", False)),
        "clean_up_tokenization_spaces": False,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n", settings


def _begins_with(token: str, number: int | None) -> dict[str, Any]:
    """A post-processor that puts one token before each text."""
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": index}} for index, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [special, texts[0]],
        "pair": [special, *texts],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _text_of(tokenizer: Mapping[str, Any], number: int) -> str | None:
    """The text of a token in the content of a tokenizer.json."""
    added = {entry["id"]: entry["content"] for entry in tokenizer.get("added_tokens") or []}
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: pairs of token and score
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    return added.get(number) or next((token for token, index in vocabulary.items() if index == number), None)


def encoding_difference(trained: str, exported: str, settings: Mapping[str, Any]) -> str | None:
    """Where the tokens of `SAMPLE` differ from those that training would have had, in words.

    None if they are the same, or the library `tokenizers` is not there to tell.

    Args:
        trained: content of the tokenizer.json that the data was prepared with.
        exported: content of the one that is exported.
        settings: content of the tokenizer_config.json beside it.
    """
    try:
        tokenizers = library()
    except UserError:
        return None
    loaded = tokenizers.Tokenizer.from_str(exported)
    named = [settings[key] for key in ("bos_token", "eos_token") if settings[key] is not None]
    loaded.add_special_tokens(named)  # as transformers does
    expected = Library(trained, name="the data's tokenizer", end=0).encode([SAMPLE.encode()])[0].tolist()
    if settings["add_bos_token"]:
        expected.insert(0, loaded.token_to_id(settings["bos_token"]))
    actual = loaded.encode(SAMPLE).ids
    if actual == expected:
        return None
    place = next((i for i, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b), len(actual))
    return f"{actual[place : place + 5]} for {expected[place : place + 5]} from token {place} of a sample on"
