"""Token files in the formats of other projects, after their specifications."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def write_llm_c(file: Path, tokens: Sequence[int]) -> None:
    header = struct.pack("<3i", 20240520, 1, len(tokens)).ljust(1024, b"\0")
    file.write_bytes(header + np.asarray(tokens, "<u2").tobytes())


def write_nanogpt(file: Path, tokens: Sequence[int]) -> None:
    file.write_bytes(np.asarray(tokens, "<u2").tobytes())


def write_megatron(
    file: Path, documents: Sequence[Sequence[int]], *, dtype: str = "<i4", code: int = 4
) -> None:
    """One sequence per document, as Megatron's `preprocess_data.py` does without sentence splitting."""
    arrays = [np.asarray(document, dtype) for document in documents]
    file.write_bytes(b"".join(array.tobytes() for array in arrays))
    pointers = np.cumsum([0, *(array.nbytes for array in arrays)])[:-1]
    file.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, code, len(arrays), len(arrays) + 1)
        + np.asarray([len(array) for array in arrays], "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + np.arange(len(arrays) + 1, dtype="<i8").tobytes()
    )
