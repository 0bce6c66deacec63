"""The tokenizer of an export: in Hugging Face transformers it makes the tokens that were trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.data.tokenizers import Library, library

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
