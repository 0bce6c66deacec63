"""Values of JSON, and parts of them in whose place others are put."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

_KEYS = ["format", "vocab_size", "dtype", "splits", "train", "shards", "file", "tokens", "first"]
"""Some that manifests have."""
_TEXTS = ["../x", "../train-000000.bin", "/dev/zero", "rank-0.safetensors", "\0", "a" * 300]
_NUMBERS = [-1, 0, 1, 2**63, 2**70, 10**400]

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([*_TEXTS, *_NUMBERS]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(_KEYS), inner, max_size=3)
    ),
    max_leaves=6,
)
"""Whatever may stand in a file of JSON, and what steers a reader that trusts it."""


def parts_of(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all parts of a JSON value; of a list, its first and last."""
    if path:
        yield path
    if isinstance(content, dict):
        for key, part in content.items():
            yield from parts_of(part, (*path, key))
    elif isinstance(content, list):
        for number in sorted({0, len(content) - 1} if content else ()):
            yield from parts_of(content[number], (*path, number))


def replace_part(content: Any, path: tuple[Any, ...], *instead: Any) -> None:
    """Put something in the place of a part of a JSON value, or nothing."""
    for key in path[:-1]:
        content = content[key]
    if instead:
        (content[path[-1]],) = instead
    else:
        del content[path[-1]]
