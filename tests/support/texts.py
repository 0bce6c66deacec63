"""Documents to prepare, and a slow and simple reference of the preparation."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.command_line import succeeded

SHARE = 0.1
"""Validation share of `prepared`."""
WORDS = ["the", "quick", "brown fox", "jumps", "over", "lazy", "dogs", "naïve", "café", "测试", "🙂", "12345"]


def some_documents(count: int, *, seed: int = 0, length: int = 60) -> list[str]:
    rng = np.random.default_rng(seed)
    return [
        " ".join(rng.choice(WORDS, size=rng.integers(1, length))).replace("dogs", "dogs.\n")
        for _ in range(count)
    ]


def write_tokenizer(file: Path, *, specials: Sequence[str] = ("</s>",)) -> Any:
    """A small BPE tokenizer, saved as a tokenizer.json; its end-of-document token is `</s>`."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(specials),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(some_documents(50, seed=9), trainer=trainer)
    tokenizer.save(str(file))
    return tokenizer


def expected_tokens(documents: Sequence[str], tokenizer: Any, *, share: float) -> dict[str, list[int]]:
    """Tokens by split: documents encoded one by one in order; those of the lowest hashes are held out."""
    end = tokenizer.token_to_id("</s>")
    in_order = sorted(documents, key=lambda text: hashlib.blake2b(text.encode(), digest_size=8).hexdigest())
    held_out = in_order[: round(share * len(documents))]
    splits: dict[str, list[int]] = {"train": [], "validation": []}
    for document in documents:
        tokens = [*tokenizer.encode(document, add_special_tokens=False).ids, end]
        splits["validation" if document in held_out else "train"] += tokens
    return splits


def written_tokens(folder: Path) -> dict[str, list[int]]:
    """Tokens of a prepared folder by split, read by its manifest."""
    content = json.loads((folder / "manifest.json").read_text())
    return {
        split: list(_tokens(folder, content, known["shards"])) for split, known in content["splits"].items()
    }


def _tokens(folder: Path, content: dict[str, Any], shards: list[dict[str, Any]]) -> Iterator[int]:
    for shard in shards:
        raw = np.fromfile(folder / shard["file"], dtype=content["dtype"])
        first = shard.get("first", 0)
        yield from raw[first : first + shard["tokens"]].tolist()


def write_lines(file: Path, documents: Sequence[str], *, field: str = "text") -> None:
    lines = [json.dumps({"id": index, field: document}) for index, document in enumerate(documents)]
    file.write_text("\n".join(lines) + "\n")


def prepared(*arguments: str | Path, out: Path, workers: int = 1) -> str:
    """Run `asyncpp data prepare` successfully; returns its output."""
    options = ["--out", out, "--workers", str(workers), "--validation-share", str(SHARE)]
    ended = succeeded("data", "prepare", *arguments, *options)
    return ended.output


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


def write_shards(folder: Path, kind: str, *, train: Sequence[int], validation: Sequence[int]) -> Path:
    """The same tokens in the format of another project; returns what `data.path` would be.

    Megatron's are one file of three documents, of which the last is held out.
    """
    folder.mkdir()
    third = len(train) // 3
    if kind == "llm.c":
        write_llm_c(folder / "text_train_000001.bin", train[: 2 * third])
        write_llm_c(folder / "text_train_000002.bin", train[2 * third :])
        write_llm_c(folder / "text_val_000000.bin", validation)
    elif kind == "nanogpt":
        write_nanogpt(folder / "train.bin", train)
        write_nanogpt(folder / "val.bin", validation)
    else:
        write_megatron(folder / "text_document.bin", [train[:third], train[third:], validation])
        return folder / "text_document"
    return folder
