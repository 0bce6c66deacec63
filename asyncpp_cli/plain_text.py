"""Text of others' making (names, reasons, logs) without the characters that steer a terminal."""

from __future__ import annotations

import re
import unicodedata

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_SURROGATE = re.compile("[\ud800-\udfff]")
_LINE_END = re.compile(r"\r\n?")


def encodable(text: str) -> str:
    """`text` as UTF-8 can have it: without lone surrogates, which stand for bytes of a name that is not."""
    return _SURROGATE.sub(REPLACEMENT, text)


def printable(text: object) -> str:
    """`text` on one line without control characters: a name cannot steer a terminal or break a row."""
    return printable_lines(" ".join(str(text).split()))


def printable_lines(text: str) -> str:
    """`text` without control characters but ends of lines and tabs; a carriage return ends a line."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        REPLACEMENT if unicodedata.category(character)[0] == "C" and character not in "\n\t" else character
        for character in _LINE_END.sub("\n", text)
    )
