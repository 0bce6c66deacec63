"""Tokenizers: bytes, and those of the library `tokenizers` (tokenizer.json).

The library is needed only for the latter, and never in training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.data.sources import EXTRA
from stages.data.prepared import MANIFEST, Prepared
from stages.data.shards import dtype_for

FORMS = "accepted: bytes, or a tokenizer.json (docs/data.md says how to make one)"
END = "<|endoftext|>"
"""End-of-document token of GPT-2, and of bytes in an export."""
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
"""Usual names of the end-of-document token, tried in order."""
BATCH = 1 << 19
"""Bytes of text to tokenize at once."""


class Tokenizer(Protocol):
    """Turns documents into tokens."""

    name: str
    vocab_size: int
    end_of_document: int
    start_of_document: int | None
    """None: documents begin with their text."""

    @property
    def text(self) -> str | None:
        """Content of the tokenizer.json; None if there is none."""

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Tokens of each document (UTF-8), without those that begin and end it."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, for display."""

    def given_back(self, documents: Sequence[np.ndarray]) -> list[bytes]:
        """The text that each document's tokens stand for; the unknown token stands for none."""


class Bytes:
    """One token per byte. A zero byte, which text does not contain, ends a document."""

    name = "bytes"
    vocab_size = 256
    end_of_document = 0
    start_of_document: int | None = None
    text = None

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def given_back(self, documents: Sequence[np.ndarray]) -> list[bytes]:
        return [document.tobytes() for document in documents]


def byte_tokenizer_json() -> str:
    """The tokenizer.json of `Bytes`: a token's id is its byte; `END` stands for the zero byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    # GPT-2 writes the other bytes as the characters from 256 on (its `bytes_to_unicode`).
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    names[Bytes.end_of_document] = END
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": Bytes.end_of_document, "content": END, "special": True, **flags}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {names[byte]: byte for byte in range(256)}, "merges": []},
    }
    return json.dumps(content, indent=1) + "\n"


class Library:
    """A tokenizer of the library `tokenizers`.

    Special tokens spelled out in a document are treated as ordinary text.

    Args:
        text: content of a tokenizer.json.
        name: for people.
        end: end-of-document token, or its number; None: the first of `ENDS` in the vocabulary.
        start: token that begins each document; None: there is none.

    Raises:
        UserError: the library is missing, the text is not a tokenizer, or a token is not in it.
    """

    def __init__(self, text: str, *, name: str, end: str | int | None, start: str | None = None) -> None:
        tokenizers = library()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(
                f"{name} is not a tokenizer that the library tokenizers reads ({error})"
            ) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        self.name = name
        self.text = text
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._dtype = np.dtype(dtype_for(self.vocab_size))
        model = json.loads(text)["model"]
        unknown = model.get("unk_id"), self._tokenizer.token_to_id(model.get("unk_token") or "")
        self._unknown = next((token for token in unknown if token is not None), -1)
        """-1: there is no unknown token."""
        if isinstance(end, int):
            self.end_of_document = end
        else:
            names = ENDS if end is None else (end,)
            end_tokens = [token for token in map(self._tokenizer.token_to_id, names) if token is not None]
            if not end_tokens:
                raise UserError(
                    f"{name} has no token {' or '.join(names)} to end a document with; "
                    "name one with --end-of-document"
                )
            self.end_of_document = end_tokens[0]
        self.start_of_document = None if start is None else self._tokenizer.token_to_id(start)
        if start is not None and self.start_of_document is None:
            raise UserError(f"{name} has no token {start} to begin a document with (--start-of-document)")

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        texts = [document.decode() for document in documents]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def given_back(self, documents: Sequence[np.ndarray]) -> list[bytes]:
        ids = [document[document != self._unknown].tolist() for document in documents]
        texts = self._tokenizer.decode_batch(ids, skip_special_tokens=False)
        return [text.encode("utf-8", "replace") for text in texts]


def library() -> Any:
    """Import the package `tokenizers`.

    Raises:
        UserError: it is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            f"this tokenizer needs the package tokenizers: {EXTRA} (or take --tokenizer bytes)"
        ) from error
    return tokenizers


def read_tokenizer(name: str, *, end: str | None, start: str | None = None) -> Tokenizer:
    """Read a tokenizer: `bytes`, or a tokenizer.json or a folder with one.

    Raises:
        UserError: it does not exist or cannot be read.
    """
    if name == "bytes":
        if end is not None:
            raise UserError("--end-of-document: with bytes, a zero byte ends a document")
        if start is not None:
            raise UserError("--start-of-document: bytes have no token that begins a document")
        return Bytes()
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"--tokenizer {name}: there is no such file; {FORMS}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text ({error})") from error
    return Library(text, name=path.name, end=end, start=start)


def recorded_text(prepared: Prepared) -> str:
    """The tokenizer.json of prepared data, which has one.

    Raises:
        UserError: it cannot be read, or is not the one that the manifest names.
    """
    assert prepared.tokenizer_file is not None
    try:
        content = prepared.tokenizer_file.read_bytes()
    except OSError as error:
        raise UserError(f"{prepared.tokenizer_file} cannot be read ({error.strerror})") from error
    if (checksum := hashlib.sha256(content).hexdigest()) != prepared.tokenizer_sha256:
        raise UserError(
            f"{prepared.tokenizer_file} is not the tokenizer that {MANIFEST} names: SHA-256 is {checksum}"
        )
    return content.decode()


def sha256_of(tokenizer: Tokenizer) -> str | None:
    """SHA-256 of the tokenizer.json."""
    return hashlib.sha256(tokenizer.text.encode()).hexdigest() if tokenizer.text is not None else None
