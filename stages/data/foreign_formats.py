"""Readers of token shards in the formats of llm.c, modded-nanogpt, nanoGPT and Megatron-LM.

None of these formats records its tokenizer or vocabulary size.
"""

from __future__ import annotations

import itertools
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stages.data.shards import DataError, Shard, count, cut, little_endian

if TYPE_CHECKING:
    import numpy as np

HEADER = 256
"""Number of 32-bit integers before the tokens in llm.c's format."""

LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""llm.c's magic numbers (GPT-2 and Llama 3), with the version and token type of each."""

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = [("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("documents", "<u8")]
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Codes of Megatron's `DType` for the types that hold tokens."""

VALIDATION_NAMES = ("val", "valid", "validation")


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Training and validation shards."""

    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]


def find_shards(path: Path) -> list[Path]:
    """The `.bin` files at a path: the file itself, those of a folder, or of a Megatron prefix with `.idx`.

    Empty if the path is something else, such as text.
    """
    if path.suffix == ".bin" and path.is_file():
        return [path]
    if path.suffix == ".idx" and path.is_file():
        return [path.with_suffix(".bin")]
    if path.is_dir():
        return sorted(file for file in path.glob("*.bin") if file.is_file() and file.name[0] != ".")
    beside = path.with_name(f"{path.name}.bin")
    if path.with_name(f"{path.name}.idx").is_file() and beside.is_file():
        return [beside]
    return []


def read_shards(files: Sequence[Path], *, validation_share: float, dtype: str = "auto") -> Splits:
    """The shards in the files, split into training and validation.

    Files with `val`, `valid` or `validation` as a part of their name are held out. Without such files the end
    is held out; in Megatron's format whole documents, if these are at most twice the share. `dtype` as for
    `read_shard`.

    Raises:
        DataError: names the file that does not match its format, and the position.
    """
    validation = held_out_files(files)
    train = [file for file in files if file not in validation]
    if not train:
        raise DataError(f"{files[0].parent} has validation shards only ({files[0].name})")
    held_out = tuple(read_shard(file, dtype=dtype) for file in validation)
    shards = tuple(read_shard(file, dtype=dtype) for file in train)
    if held_out:
        return Splits(train=shards, validation=held_out)
    at = count(shards) - round(count(shards) * validation_share)
    last = shards[-1]
    if (index := last.file.with_suffix(".idx")).is_file():
        before = count(shards[:-1])
        starts = _document_starts(index) + before
        earlier = starts[starts <= at]
        whole = int(earlier[-1]) if len(earlier) and earlier[-1] > before else at
        at = whole if count(shards) - whole <= 2 * (count(shards) - at) else at
    kept, rest = cut(shards, at=at)
    return Splits(train=kept, validation=rest)


def read_shard(file: Path, *, dtype: str = "auto") -> Shard:
    """The shard in a `.bin` file; an `.idx` beside it or its first number determines the format.

    Args:
        file: to read.
        dtype: type of its tokens, if neither says it (`data.dtype`).

    Raises:
        DataError: the file is missing or truncated, its header or index does not match it, or its tokens seem
            to be of another type than `auto`'s 16 bits.
    """
    import numpy as np

    try:
        size = file.stat().st_size
        if (index := file.with_suffix(".idx")).is_file():
            return _read_megatron(file, index, size=size)
        with file.open("rb") as opened:
            header = np.frombuffer(opened.read(4 * HEADER), dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror})") from error
    if len(header) == 4 * HEADER and (magic := int(header.view("<i4")[0])) in LLM_C:
        return _read_llm_c(file, header.view("<i4"), magic=magic, size=size)
    if len(header) == 4 * HEADER and int(header.view(">i4")[0]) in LLM_C:
        raise DataError(f"{file} is big-endian; accepted: little-endian token files")
    if dtype == "auto" and (seems := _other_type(file, size=size)) is not None:
        raise DataError(
            f"{file} has no header, and does not look like 16-bit tokens, nanoGPT's format: it seems to hold "
            f"{seems}, or data.dtype: uint16 if it is not so"
        )
    dtype = "uint16" if dtype == "auto" else dtype
    width = little_endian(dtype).itemsize
    if size == 0 or size % width:
        raise DataError(
            f"{file} has {size} bytes and no header, so it should hold tokens of type {dtype} (data.dtype); "
            f"its size must be a multiple of {width} and above 0 (is the file truncated?)"
        )
    return Shard(file=file, dtype=dtype, tokens=size // width)


_SAMPLED = 1 << 14
"""Bytes of each of the four places of a file that are looked at."""
_FEWEST = 64
"""Least number of 16-bit numbers, and of different ones, that something is concluded from."""


def _other_type(file: Path, *, size: int) -> str | None:
    """What a file without a header seems to hold rather than 16-bit tokens, in words, and what is accepted.

    Tokens of 32 or 64 bits are small for their type: almost all of every second, or of three in four, 16-bit
    numbers are 0 or 1 (up to 15 with a million tokens; 65535 where one is negative), and the others are not.
    Of 16-bit tokens the byte that counts more has the smaller values, for it depends on the vocabulary.
    """
    import numpy as np

    places = [size * quarter // 4 // 8 * 8 for quarter in range(4)]
    with file.open("rb") as opened:
        parts = [opened.read(_SAMPLED) for place in places if opened.seek(place) == place]
    whole = b"".join(part[: len(part) // 8 * 8] for part in parts)
    numbers = np.frombuffer(whole, "<u2").reshape(-1, 4)
    if numbers.size < _FEWEST:
        return None
    for most, swapped in itertools.product((1, 15), (False, True)):
        values = numbers.byteswap() if swapped else numbers
        share = ((values <= most) | (values == 65535)).mean(axis=0)
        small = share >= 0.99
        seems = _WIDER.get((swapped, *small.tolist()))
        if seems is not None and (share[~small] < 0.9).all():
            return seems
    if b"\0" not in whole and _is_utf8(parts[0]):
        return "text, or tokens of 8 bits; accepted: data.dtype: uint8"
    if len(np.unique(numbers)) >= _FEWEST and (numbers >> 8).max() > (numbers & 255).max():
        return "big-endian tokens of 16 bits; accepted: little-endian ones"
    return None


def _is_utf8(start: bytes) -> bool:
    try:
        getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return True


_WIDER = {
    (False, False, True, False, True): "tokens of 32 bits; accepted: data.dtype: uint32 or int32",
    (False, False, True, True, True): "tokens of 64 bits; accepted: data.dtype: int64",
    (True, True, False, True, False): "big-endian tokens of 32 bits; accepted: little-endian ones",
    (True, True, True, True, False): "big-endian tokens of 64 bits; accepted: little-endian ones",
}
"""By whether bytes are swapped, and which of four 16-bit numbers are small then."""


def held_out_files(files: Sequence[Path]) -> list[Path]:
    """The files with `val`, `valid` or `validation` as a part of their name."""
    return [file for file in files if _is_validation(file)]


def _is_validation(file: Path) -> bool:
    parts = file.stem.lower().replace("-", "_").replace(".", "_").split("_")
    return any(part in VALIDATION_NAMES for part in parts)


def _read_llm_c(file: Path, header: np.ndarray, *, magic: int, size: int) -> Shard:
    version, dtype = LLM_C[magic]
    tokens = int(header[2])
    if header[1] != version:
        raise DataError(f"{file}: header has version {header[1]} at byte 4; accepted: {version}")
    expected = 4 * HEADER + tokens * little_endian(dtype).itemsize
    if tokens < 1 or size != expected:
        raise DataError(
            f"{file} is truncated or damaged: its header (byte 8) says {tokens} tokens, so {expected} bytes; "
            f"it has {size}"
        )
    return Shard(file=file, dtype=dtype, header=4 * HEADER, tokens=tokens)


@dataclass(frozen=True, kw_only=True)
class _Index:
    dtype: str
    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray


def _read_megatron(file: Path, index: Path, *, size: int) -> Shard:
    content = _read_index(index)
    width = little_endian(content.dtype).itemsize
    tokens = int(content.lengths.sum(dtype="int64"))
    if size != tokens * width:
        raise DataError(
            f"{file} and {index.name} do not belong together, or one is truncated: the index counts {tokens} "
            f"tokens of {width} bytes, so {tokens * width} bytes; the file has {size}"
        )
    ends = content.lengths.cumsum(dtype="int64")
    (wrong,) = (content.pointers != (ends - content.lengths) * width).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise DataError(
            f"{index}: sequence {place} is said to begin at byte {content.pointers[place]} of {file.name}, "
            f"and those before it end at {(ends - content.lengths)[place] * width}"
        )
    return Shard(file=file, dtype=content.dtype, tokens=tokens)


def _read_index(file: Path) -> _Index:
    import numpy as np

    raw = np.memmap(file, dtype=np.uint8, mode="r") if file.stat().st_size else np.empty(0, np.uint8)
    form = np.dtype(MEGATRON_HEADER)
    start = len(MEGATRON_MAGIC) + form.itemsize
    if raw[: len(MEGATRON_MAGIC)].tobytes() != MEGATRON_MAGIC or len(raw) < start:
        raise DataError(f"{file} is no Megatron index: it does not begin with MMIDIDX and a header")
    header = raw[len(MEGATRON_MAGIC) : start].view(form)[0]
    if header["version"] != 1:
        raise DataError(f"{file}: header has version {header['version']} at byte 9; accepted: 1")
    if int(header["dtype"]) not in MEGATRON_DTYPES:
        accepted = ", ".join(f"{code} ({name})" for code, name in MEGATRON_DTYPES.items())
        raise DataError(f"{file}: tokens of type {header['dtype']} at byte 17; accepted: {accepted}")
    sequences, documents = int(header["sequences"]), int(header["documents"])
    expected = start + 12 * sequences + 8 * documents
    # A multimodal index has one more byte per sequence, which is irrelevant for text.
    if len(raw) not in (expected, expected + sequences) or sequences < 1:
        raise DataError(
            f"{file} is truncated or damaged: its header says {sequences} sequences in {documents} document "
            f"bounds, so {expected} bytes; it has {len(raw)}"
        )
    at_pointers, at_documents = start + 4 * sequences, start + 12 * sequences
    lengths = raw[start:at_pointers].view("<i4")
    bounds = raw[at_documents:expected].view("<i8")
    if (lengths < 0).any():
        raise DataError(f"{file}: sequence {int(np.argmax(lengths < 0))} has a negative length")
    if len(bounds) and (bounds[0] < 0 or bounds[-1] > sequences or (np.diff(bounds) < 0).any()):
        raise DataError(f"{file}: the bounds of documents at byte {at_documents} are not in order")
    return _Index(
        dtype=MEGATRON_DTYPES[int(header["dtype"])],
        lengths=lengths,
        pointers=raw[start + 4 * sequences : at_documents].view("<i8"),
        documents=bounds,
    )


def _document_starts(file: Path) -> np.ndarray:
    """Token index at which each document begins."""
    import numpy as np

    content = _read_index(file)
    ends = np.concatenate(([0], np.cumsum(content.lengths, dtype=np.int64)))
    return np.asarray(ends[content.documents])
