"""`asyncpp data prepare` takes no more memory than it says, whatever it is given."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from support.command_line import refusal
from support.texts import prepared, write_tokenizer

from asyncpp_cli.data import documents, parts, sources

pytestmark = pytest.mark.usefixtures("own_cache")

MIB = 1 << 20


def refused(file: Path) -> str:
    words = ["--tokenizer", "bytes", "--workers", "1", "--out", file.parent / "out"]
    return refusal("data", "prepare", file, *words)


@pytest.mark.slow
def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LONGEST_LINE", MIB)
    monkeypatch.setattr(documents, "LONGEST_LINE", MIB)
    start = b'{"text": "first"}\n{"text": "'
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(start + b"a" * 24 * MIB + b'"}\n', 1))
    (tmp_path / "nested.jsonl").write_text("[")
    refused(tmp_path / "nested.jsonl")  # what the command imports is not to be counted
    tracemalloc.start()
    try:
        said = refused(tmp_path / "x.jsonl.gz")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "x.jsonl.gz, line 2: longer than 1 MiB; a line is one document" in said
    assert peak < 12 * MIB


def test_a_long_line_inside_of_a_part_is_refused_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "LONGEST_LINE", 1000)
    lines = [json.dumps({"text": "a" * size}) for size in (10, 2000, 10)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    assert "x.jsonl, line 2: longer than" in refused(tmp_path / "x.jsonl")


def test_a_little_zstandard_is_not_unpacked_into_much_at_once(tmp_path: Path) -> None:
    (tmp_path / "x.zst").write_bytes(zstandard.compress(bytes(256 * MIB)))
    [source] = sources.find_sources([str(tmp_path / "x.zst")])
    with sources.opened(source) as (stream, _):
        sizes = [len(stream.read(MIB)) for _ in range(3)]
    assert max(sizes) <= 33 * MIB


def test_data_that_unpacks_to_too_much_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "UNPACK_MEMORY", 1 << 17)
    (tmp_path / "x.txt.zst").write_bytes(zstandard.compress(b"text" * MIB))
    assert "x.txt.zst cannot be read" in refused(tmp_path / "x.txt.zst")


def test_a_document_of_json_is_cut_where_a_text_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LONGEST", 100)
    write_tokenizer(tmp_path / "tokenizer.json")
    lines = "\n".join(f"line {number} of a long document" for number in range(30))
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": lines}))
    prepared(tmp_path / "x.jsonl", "--tokenizer", "bytes", out=tmp_path / "out")
    content = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert sum(split["documents"] for split in content["splits"].values()) > 5


def test_highly_compressed_data_is_read_in_smaller_pieces(tmp_path: Path) -> None:
    import polars

    texts = [f"{number} " + "abc " * 5000 for number in range(400)]
    polars.DataFrame({"text": texts}).write_parquet(tmp_path / "x.parquet")
    [source] = sources.find_sources([str(tmp_path / "x.parquet")])
    [part] = parts.parts([source], size=MIB, separator="", field="text")
    sizes = [
        sum(len(document.text) for document in documents.documents(piece, field="text", separator=""))
        for piece in part.pieces
    ]
    assert sum(sizes) == sum(map(len, texts))
    assert max(sizes) <= parts.MOST_PACKED * 1.1 * MIB
