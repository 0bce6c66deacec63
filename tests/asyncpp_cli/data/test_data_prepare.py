"""`asyncpp data prepare`: what it writes is what the slow and obvious way writes."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from support.command_line import asyncpp, refusal, succeeded
from support.files import contents
from support.texts import (
    SHARE,
    expected_tokens,
    prepared,
    some_documents,
    write_lines,
    write_tokenizer,
    written_tokens,
)

from asyncpp_cli.data import documents, parts, sources

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.slow
def test_every_form_of_input_gives_each_documents_tokens_in_order(tmp_path: Path) -> None:
    import polars

    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    groups = [some_documents(40, seed=seed) for seed in range(8)]
    texts = tmp_path / "in"
    (texts / "deeper").mkdir(parents=True)
    end = "\n<|endoftext|>\n"
    (texts / "a.txt").write_bytes(end.join(groups[0]).encode())
    (texts / "b.txt.gz").write_bytes(gzip.compress(end.join(groups[1]).encode()))
    halves = [zstandard.compress(half.encode()) for half in (end.join(groups[2]), "")]
    (texts / "c.txt.zst").write_bytes(b"".join(halves))
    write_lines(texts / "d.jsonl", groups[3])
    write_lines(texts / "plain", groups[4])
    (texts / "deeper" / "e.jsonl.xz").write_bytes(lzma.compress((texts / "plain").read_bytes()))
    write_lines(texts / "plain", groups[5])
    (texts / "deeper" / "f.jsonl.bz2").write_bytes(bz2.compress((texts / "plain").read_bytes()))
    (texts / "plain").unlink()
    (texts / "g.py").write_text("\n" + groups[6][0] + "\n\n")
    polars.DataFrame({"text": [*groups[7], None, ""], "other": 1}).write_parquet(texts / "h.parquet")
    (texts / "picture.png").write_bytes(b"\x89PNG\0\0")
    (texts / ".hidden.txt").write_text("secret")
    prepared(texts, "--tokenizer", tmp_path / "tokenizer.json", out=tmp_path / "out")
    in_order = [text for group in groups[:6] for text in group]
    in_order += [groups[6][0], *groups[7]]
    stripped = [document.strip("\n") for document in in_order]
    documents = [*stripped[:120], *in_order[120:240], stripped[240], *in_order[241:]]
    assert written_tokens(tmp_path / "out") == expected_tokens(documents, tokenizer, share=SHARE)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert sum(split["documents"] for split in manifest["splits"].values()) == len(documents)
    assert sum(split["bytes"] for split in manifest["splits"].values()) == len("".join(documents).encode())


def test_bytes_need_no_library_and_a_zero_ends_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for missing in ("tokenizers", "polars", "zstandard"):
        monkeypatch.setitem(sys.modules, missing, None)
    documents = some_documents(60)
    (tmp_path / "in.txt").write_text("\n\n".join(text.replace("\n", " ") for text in documents))
    prepared(tmp_path / "in.txt", "--tokenizer", "bytes", "--separator", "", out=tmp_path / "out")
    splits = {split: bytes(tokens) for split, tokens in written_tokens(tmp_path / "out").items()}
    assert all(text.endswith(b"\0") for text in splits.values())
    found = b"".join(splits.values()).decode().split("\0")[:-1]
    assert sorted(found) == sorted(text.replace("\n", " ") for text in documents)


@pytest.mark.parametrize(
    "pattern", ["../texts/*.txt", "../texts/**.txt", "../texts/.more/*.txt", "../**/*.txt"]
)
def test_a_pattern_finds_what_a_shell_finds(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("here", "texts/.more"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("a.txt", ".hidden.txt", ".more/a.txt"):
        (tmp_path / "texts" / file).write_text("text")
    monkeypatch.chdir(tmp_path / "here")
    found = [source.name for source in sources.find_sources([pattern])]
    assert found == [pattern.replace("**/", "texts/").replace("**", "*").replace("*", "a")]


@pytest.mark.parametrize(
    ("way", "pack", "between"),
    [
        ("gz", gzip.compress, bytes(7)),
        ("xz", lzma.compress, bytes(4)),
        ("xz", lzma.compress, bytes(8192)),
        ("bz2", bz2.compress, b""),
        ("zst", zstandard.compress, bytes.fromhex("512a4d18 03000000 616263")),  # a frame to be skipped
    ],
)
def test_each_stream_of_a_compressed_file_is_read(
    way: str, pack: Callable[[bytes], bytes], between: bytes, tmp_path: Path
) -> None:
    file = tmp_path / f"x.txt.{way}"
    parts = [b"first\n", b"", b"second\n" * 400_000, b"last\n"]
    file.write_bytes(between.join([*map(pack, parts), b""]))
    [source] = sources.find_sources([str(file)])
    with sources.opened(source) as (stream, _):
        assert b"".join(iter(lambda: stream.read(1 << 16), b"")) == b"".join(parts)


def test_files_of_a_folder_that_are_left_out_are_named(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text " * 100)
    (tmp_path / "texts" / "b.png").write_bytes(b"\x89PNG\0\0")
    said = asyncpp("data", "prepare", tmp_path / "texts", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert (said.code, "texts: b.png not read: no text" in said.errors) == (0, True)
    (tmp_path / "texts" / "c.txt.lz4").write_bytes(b"\x04\x22\x4d\x18" + bytes(9))
    said = refusal("data", "prepare", tmp_path / "texts", "--tokenizer", "bytes", "--out", tmp_path / "again")
    assert "c.txt.lz4 is compressed or an archive" in said


@pytest.mark.parametrize(
    ("kind", "share", "kept", "becomes"),
    [
        ("dropped", "25.00%", "abcd", "'ab CDé cd' becomes 'abcd'"),
        ("unknown", "25.00%", "abcd", "'ab CDé cd' becomes 'abcd'"),
        ("no decoder", "97.50%", "ab  cd", "'xx' becomes 'x x'"),
        ("lowercase", "25.00%", "ab é cd", "'ab CDé cd' becomes 'ab cdé cd'"),
    ],
)
def test_bytes_are_those_that_decoding_gives_back(
    kind: str, share: str, kept: str, becomes: str, tmp_path: Path
) -> None:
    """Bits per byte are of these: they were of bytes that no token stood for."""
    import tokenizers

    characters = "abcd éx" if kind == "lowercase" else "abcdx"
    vocab = {character: number for number, character in enumerate(["</s>", "[UNK]", *characters])}
    model = tokenizers.models.BPE(vocab, [], unk_token="[UNK]" if kind == "unknown" else None)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Lowercase() if kind == "lowercase" else None
    tokenizer.decoder = None if kind == "no decoder" else tokenizers.decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = [*("x" * (number + 1) for number in range(30)), *["ab CDé cd"] * 10]
    write_lines(tmp_path / "in.jsonl", texts)
    out = tmp_path / "out"
    arguments = ["--tokenizer", tmp_path / "tokenizer.json", "--validation-share", "0.5", "--out", out]
    said = succeeded("data", "prepare", tmp_path / "in.jsonl", *arguments, "--workers", "1").errors
    assert f"{share} of the documents do not decode to their text ({tmp_path}/in.jsonl, line " in said
    assert becomes in said
    manifest = json.loads((out / "manifest.json").read_text())
    splits = manifest["splits"].values()
    assert sum(split["bytes"] for split in splits) == sum(range(31)) + 10 * len(kept.encode())
    share_of_hashes = manifest["made_from"]["settings"]["hashes_held_out"]
    held_out = [text for text in texts if documents.is_held_out(text.encode(), share=share_of_hashes)]
    kept_text = "".join(held_out).replace("ab CDé cd", kept).encode()
    shares = [kept_text.count(byte) / len(kept_text) for byte in set(kept_text)]
    assert manifest["unigram_bits_per_byte"] == pytest.approx(-sum(p * math.log2(p) for p in shares))


def test_a_long_line_of_blanks_is_searched_once_for_an_empty_separator() -> None:
    text = b"a\n" + b" " * 1_000_000 + b"b\n \nc"
    assert [len(part) for part in parts.separator_line("").split(text)] == [1_000_003, 2]


def test_one_document_holds_out_its_end(tmp_path: Path) -> None:
    text = "0123456789" * 50
    (tmp_path / "in.txt").write_text(text)
    prepared(tmp_path / "in.txt", "--tokenizer", "bytes", out=tmp_path / "out")
    splits = {split: bytes(tokens) for split, tokens in written_tokens(tmp_path / "out").items()}
    assert splits["train"] + splits["validation"] == text.encode() + b"\0"
    assert len(splits["validation"]) == 50


@pytest.mark.parametrize("share", ["0.9", "0.96", "0.5", "0.1"])
@pytest.mark.parametrize("seed", range(4))
def test_a_share_of_a_few_documents_is_met_within_one(share: str, seed: int, tmp_path: Path) -> None:
    texts = [f"{seed}: {number}" for number in range(10)]
    write_lines(tmp_path / "in.jsonl", texts)
    arguments = ["--tokenizer", "bytes", "--validation-share", share, "--out", tmp_path / "out"]
    said = succeeded("data", "prepare", tmp_path / "in.jsonl", *arguments, "--workers", "1").errors
    splits = {split: bytes(tokens).split(b"\0") for split, tokens in written_tokens(tmp_path / "out").items()}
    assert abs(len(splits["validation"]) - 1 - 10 * float(share)) < 1
    assert len(splits["train"]) > 1
    assert ("a larger --validation-share" in said) == (share == "0.1")


def test_a_share_that_copies_do_not_allow_is_told_with_the_number(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", ["copy"] * 30 + ["a", "b"])
    arguments = ["--tokenizer", "bytes", "--validation-share", "0.5", "--out", tmp_path / "out"]
    said = succeeded("data", "prepare", tmp_path / "in.jsonl", *arguments, "--workers", "1").errors
    assert "of 32 documents are held out" in said
    assert "and not --validation-share 50.00%" in said


@pytest.mark.slow
def test_documents_and_lines_of_any_length_are_read(tmp_path: Path) -> None:
    long = "word " * 1_000_000
    (tmp_path / "in.txt").write_text("short\n<|endoftext|>\n" + long.strip() + "\n<|endoftext|>\nlast")
    write_lines(tmp_path / "in.jsonl", ["first", long, "last"])
    (tmp_path / "lines.txt").write_text("né " * 30 + "\n" + "é" * 3_000_000 + "\n" + "ab\n" * 1000)
    inputs = [tmp_path / name for name in ("in.txt", "in.jsonl", "lines.txt")]
    prepared(*inputs, "--tokenizer", "bytes", out=tmp_path / "out")
    texts = [bytes(tokens).decode() for tokens in written_tokens(tmp_path / "out").values()]
    assert sum(text.count("é") for text in texts) == 3_000_030
    assert sum(text.count("word") for text in texts) == 2_000_000
    # One in three of text (cut at most every 4 MiB), three of lines, of which one is cut likewise.
    assert sum(text.count("\0") for text in texts) == 4 + 3 + 4


ENDS = {"lf": "\n", "crlf": "\r\n", "cr": "\r"}
BLANKS = [("", ""), ("", " "), ("\ufeff", "\t"), (" \u00a0", " \ufeff"), ("\u3000", "\f")]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("separator", ["<|endoftext|>", "", "---"])
def test_a_separator_is_a_line_however_lines_end_and_whatever_blanks_are_around_it(
    separator: str, end: str, tmp_path: Path
) -> None:
    texts = [text.replace("\n", " ").strip() for text in some_documents(20)]
    texts[3] += f"{ENDS[end]}{separator or 'x'} within a line, {separator}"
    lines = [f"{before}{separator}{after}{ENDS[end]}" for before, after in BLANKS]
    # A byte order mark, separators before the first document and behind the last, and two behind each.
    content = "\ufeff" + lines[0]
    for index, text in enumerate(texts):
        content += f"{text}{ENDS[end]}{lines[index % 5]}{lines[index % 4]}"
    (tmp_path / "in.txt").write_bytes(content.removesuffix(ENDS[end]).encode())
    prepared(tmp_path / "in.txt", "--tokenizer", "bytes", "--separator", separator, out=tmp_path / "out")
    tokens = [token for split in written_tokens(tmp_path / "out").values() for token in split]
    assert sorted(bytes(tokens).decode().split("\0")[:-1]) == sorted(texts)


@pytest.mark.parametrize("separator", ["<|endoftext|>", ""])
@pytest.mark.parametrize("end", ENDS)
def test_parts_are_cut_at_separators_however_lines_end(
    end: str, separator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With parts of a few documents, and reads that end anywhere, also between CR and LF."""
    texts = [text.replace("\n", " ").strip() for text in some_documents(200)]
    content = f"{ENDS[end]}{separator}{ENDS[end]}".join(texts).encode()
    (tmp_path / "in.txt").write_bytes(content)
    monkeypatch.setattr(parts, "LONGEST", 4000)
    [source] = sources.find_sources([str(tmp_path / "in.txt")])
    for size in range(990, 1010):
        monkeypatch.setattr(parts, "READ", size)
        pieces = [
            piece
            for part in parts.parts([source], size=3000, separator=separator, field="text")
            for piece in part.pieces
        ]
        assert len(pieces) > 5
        assert b"".join(piece.content for piece in pieces) == content
        found = [d for piece in pieces for d in documents.documents(piece, field="text", separator=separator)]
        assert [document.text.decode() for document in found] == texts
        lines = content.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
        assert [lines[document.number - 1] for document in found] == texts


def test_a_separator_within_lines_is_remarked_on(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("<|endoftext|>".join(some_documents(40)))
    said = asyncpp("data", "prepare", tmp_path / "in.txt", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert "<|endoftext|> stands 39 times within lines, where it ends no document" in said.errors


@pytest.mark.slow
def test_the_result_does_not_depend_on_the_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Little text makes many parts: they are cut in the process that is asked.
    monkeypatch.setattr(parts, "SMALLEST", 1 << 15)
    monkeypatch.setattr(parts, "READ", 1 << 15)
    write_tokenizer(tmp_path / "tokenizer.json")
    for index in range(3):
        write_lines(tmp_path / f"{index}.jsonl", some_documents(400, seed=index))
    inputs = [str(tmp_path / "*.jsonl"), "--tokenizer", tmp_path / "tokenizer.json"]
    prepared(*inputs, out=tmp_path / "one", workers=1)
    prepared(*inputs, out=tmp_path / "three", workers=3)
    one, three = contents(tmp_path / "one"), contents(tmp_path / "three")
    assert len(one) > 4
    assert one == three
    # What fails leaves nothing.
    with (tmp_path / "2.jsonl").open("a") as file:
        file.write("{")
    refused = ["data", "prepare", *inputs, "--out", tmp_path / "new", "--workers", "2"]
    assert "2.jsonl, line 401: not JSON" in refusal(*refused)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["cache", "one", "three"]
