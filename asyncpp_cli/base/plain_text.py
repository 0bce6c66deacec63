"""Removes control characters from untrusted text (names, error reasons, logs)."""

from __future__ import annotations

import re
import unicodedata

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_SURROGATE = re.compile("[\ud800-\udfff]")
_LINE_END = re.compile(r"\r\n?")


def encodable(text: str) -> str:
    """`text` without lone surrogates (bytes of names that are not UTF-8), so that UTF-8 can encode it."""
    return _SURROGATE.sub(REPLACEMENT, text)


def printable(text: object) -> str:
    """`text` on one line without control characters, so that it cannot control a terminal or break a row."""
    return printable_lines(" ".join(str(text).split()))


def printable_lines(text: str) -> str:
    """`text` without control characters except line ends and tabs; a carriage return becomes a line end."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        REPLACEMENT if unicodedata.category(character)[0] == "C" and character not in "\n\t" else character
        for character in _LINE_END.sub("\n", text)
    )
