"""`asyncpp data prepare`: what it writes is what the slow and obvious way writes, whoever does the work."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import zstandard
from command_line import asyncpp
from texts import expected_tokens, some_documents, write_lines, write_tokenizer, written_tokens

from asyncpp_cli.data import parts

SHARE = 0.1


def prepared(*arguments: str | Path, out: Path, workers: int = 1) -> str:
    ended = asyncpp(
        "data",
        "prepare",
        *arguments,
        "--out",
        out,
        "--workers",
        str(workers),
        "--validation-share",
        str(SHARE),
    )
    assert ended.code == 0, ended.errors
    return ended.output


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


SMALL_PARTS = "import asyncpp_cli.data.parts as parts; parts.SMALLEST = parts.READ = 1 << 15"


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little text makes many parts: they are cut in the process that is asked."""
    monkeypatch.setattr(parts, "SMALLEST", 1 << 15)
    monkeypatch.setattr(parts, "READ", 1 << 15)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCPP_CACHE", str(tmp_path / "cache"))


def test_every_form_of_input_gives_each_documents_tokens_in_order(tmp_path: Path) -> None:
    import polars

    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    groups = [some_documents(40, seed=seed) for seed in range(8)]
    texts = tmp_path / "in"
    (texts / "deeper").mkdir(parents=True)
    joined = "\n<|endoftext|>\n".join(groups[0]).encode()
    (texts / "a.txt").write_bytes(joined)
    (texts / "b.txt.gz").write_bytes(gzip.compress("\n<|endoftext|>\n".join(groups[1]).encode()))
    halves = [zstandard.compress(half.encode()) for half in ("\n<|endoftext|>\n".join(groups[2]), "")]
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
    in_order = [
        *groups[0],
        *groups[1],
        *groups[2],
        *groups[3],
        *groups[4],
        *groups[5],
        groups[6][0],
        *groups[7],
    ]
    stripped = [document.strip("\n") for document in in_order]
    documents = [*stripped[:120], *in_order[120:240], stripped[240], *in_order[241:]]
    assert written_tokens(tmp_path / "out") == expected_tokens(documents, tokenizer, share=SHARE)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert sum(split["documents"] for split in manifest["splits"].values()) == len(documents)
    assert sum(split["bytes"] for split in manifest["splits"].values()) == len("".join(documents).encode())


@pytest.mark.usefixtures("_small_parts")
def test_the_result_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    for index in range(3):
        write_lines(tmp_path / f"{index}.jsonl", some_documents(400, seed=index))
    inputs = [str(tmp_path / "*.jsonl"), "--tokenizer", tmp_path / "tokenizer.json"]
    prepared(*inputs, out=tmp_path / "one", workers=1)
    prepared(*inputs, out=tmp_path / "three", workers=3)
    one = contents(tmp_path / "one")
    assert len(one) > 4
    assert one == contents(tmp_path / "three")


@pytest.mark.usefixtures("_small_parts")
def test_a_killed_preparation_goes_on_and_keeps_what_was_finished(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    write_lines(tmp_path / "in.jsonl", some_documents(4000))
    out = tmp_path / "out"
    inputs = [tmp_path / "in.jsonl", "--tokenizer", tmp_path / "tokenizer.json"]
    share = ["--validation-share", str(SHARE)]
    begin = f"{SMALL_PARTS}; from asyncpp_cli.main import main; main()"
    rest = ["data", "prepare", *inputs, "--out", out, "--workers", "2", *share]
    command = [sys.executable, "-c", begin, *map(str, rest)]
    killed = subprocess.Popen(command, start_new_session=True)
    try:
        while not (finished := list(out.glob("unfinished/0*.json"))):
            assert killed.poll() is None
            time.sleep(0.01)
    finally:
        killed.kill()
        killed.wait()
    assert not (out / "manifest.json").exists()
    group_is_gone(killed.pid)
    finished = list(out.glob("unfinished/0*.json"))
    shards = {out / f"train-{file.stem}.bin" for file in finished}
    written = {shard: shard.stat().st_mtime_ns for shard in shards}
    refused = asyncpp("data", "inspect", out)
    assert refused.code == 2
    assert "not prepared to the end" in refused.errors
    prepared(*inputs, out=out)
    assert {shard: shard.stat().st_mtime_ns for shard in shards} == written
    prepared(*inputs, out=tmp_path / "at once")
    assert contents(out) == contents(tmp_path / "at once")
    before = contents(out)
    assert "complete already" in asyncpp("data", "prepare", *inputs, "--out", out, *share).errors
    assert contents(out) == before


def group_is_gone(pid: int) -> None:
    """Wait until no process of a killed one's session is left."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    pytest.fail("processes outlive the one that started them")


def test_gpt2_files_and_a_tokenizer_json_give_the_same_tokens(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "whole.json")
    folder = tmp_path / "bpe"
    folder.mkdir()
    tokenizer.model.save(str(folder))
    known = json.loads((folder / "vocab.json").read_text())
    # GPT-2's files name their own end of a document.
    known["<|endoftext|>"] = known.pop("</s>")
    (folder / "encoder.json").write_text(json.dumps(known))
    (folder / "vocab.json").unlink()
    (folder / "merges.txt").rename(folder / "vocab.bpe")
    documents = [*some_documents(30), "a </s> and <|endoftext|> inside of a line are text"]
    write_lines(tmp_path / "in.jsonl", documents)
    prepared(tmp_path / "in.jsonl", "--tokenizer", folder, out=tmp_path / "a")
    prepared(tmp_path / "in.jsonl", "--tokenizer", tmp_path / "whole.json", out=tmp_path / "b")
    assert written_tokens(tmp_path / "a") == written_tokens(tmp_path / "b")
    tokens = [token for split in written_tokens(tmp_path / "a").values() for token in split]
    assert tokens.count(known["<|endoftext|>"]) == len(documents)


def test_a_tokenizer_is_trained_on_what_is_not_held_out(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", some_documents(200))
    out = tmp_path / "out"
    prepared(tmp_path / "in.jsonl", "--tokenizer", "train:300", out=out)
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    splits = written_tokens(out)
    assert max(max(tokens) for tokens in splits.values()) < 300
    text = "".join(some_documents(200))
    decoded = "".join(tokenizer.decode(tokens, skip_special_tokens=True) for tokens in splits.values())
    assert sorted(decoded) == sorted(text)
    assert len(decoded.encode()) > 1.5 * sum(map(len, splits.values()))


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


def test_one_document_holds_out_its_end(tmp_path: Path) -> None:
    text = "0123456789" * 50
    (tmp_path / "in.txt").write_text(text)
    prepared(tmp_path / "in.txt", "--tokenizer", "bytes", out=tmp_path / "out")
    splits = {split: bytes(tokens) for split, tokens in written_tokens(tmp_path / "out").items()}
    assert splits["train"] + splits["validation"] == text.encode() + b"\0"
    assert len(splits["validation"]) == 50


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
    # One in three of text (cut at most every 4 MiB), three of lines.
    assert sum(text.count("\0") for text in texts) == 4 + 3 + 3


def break_line(file: Path) -> None:
    lines = file.read_text().splitlines()
    lines[2] = "{" + lines[2][2:]
    file.write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("name", "damage", "arguments", "says"),
    [
        ("x.jsonl", break_line, [], ["x.jsonl, line 3: not JSON"]),
        ("x.jsonl", None, ["--field", "body"], ["x.jsonl, line 1: no field 'body'", "id, text"]),
        ("x.jsonl", None, ["--field", "id"], ["x.jsonl, line 1: the field 'id' holds no text"]),
        ("x.txt", lambda file: file.write_bytes(b"a\nb\nc\xff\n"), [], ["x.txt, line 3: not UTF-8"]),
        ("x.txt", lambda file: file.write_bytes(b""), [], ["is empty"]),
        ("x.txt", lambda file: file.write_bytes(b"\n\n"), [], ["hold no text"]),
        ("x.txt", Path.unlink, [], ["x.txt does not exist", "pattern"]),
        (
            "x.jsonl.gz",
            lambda file: file.write_bytes(gzip.compress(b"{}")[:-3]),
            [],
            ["x.jsonl.gz cannot be read"],
        ),
        (
            "x.txt.xz",
            lambda file: file.write_bytes(lzma.compress(b"text" * 99)[:-9]),
            [],
            ["x.txt.xz cannot be read"],
        ),
        (
            "x.txt.zst",
            lambda file: file.write_bytes(zstandard.compress(b"text" * 9)[:-5]),
            [],
            ["middle of a frame"],
        ),
        (
            "x.txt.zst",
            lambda file: file.write_bytes(b"no zstandard at all"),
            [],
            ["x.txt.zst cannot be read"],
        ),
        ("x.parquet", lambda file: file.write_bytes(b"PAR1 is not enough"), [], ["x.parquet is not Parquet"]),
        ("x.jsonl", None, ["--tokenizer", "bpe"], ["--tokenizer bpe", "accepted: bytes"]),
        ("x.jsonl", None, ["--tokenizer", "train:100"], ["train:100", "at least 257"]),
        ("x.jsonl", None, ["--end-of-document", "<end>"], ["tokenizer.json has no token <end>"]),
        ("x.jsonl", None, ["--validation-share", "1"], ["--validation-share is 1"]),
        ("x.jsonl", None, ["--workers", "0"], ["--workers is 0"]),
    ],
)
def test_what_cannot_be_read_is_refused_by_file_and_place(
    name: str, damage: Callable[[Path], object] | None, arguments: list[str], says: list[str], tmp_path: Path
) -> None:
    file = tmp_path / name
    write_lines(file, some_documents(5))
    write_tokenizer(tmp_path / "tokenizer.json")
    if damage is not None:
        damage(file)
    ended = asyncpp(
        *("data", "prepare", file, "--tokenizer", tmp_path / "tokenizer.json", "--workers", "1"),
        *("--out", tmp_path / "out", *arguments),
    )
    assert ended.code == 2
    assert "Traceback" not in ended.errors
    for words in says:
        assert words in ended.errors


def test_a_parquet_column_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    import polars

    polars.DataFrame({"body": ["a"], "number": [1]}).write_parquet(tmp_path / "x.parquet")
    inputs = ["data", "prepare", tmp_path / "x.parquet", "--tokenizer", "bytes", "--out", tmp_path / "out"]
    assert "no column 'text' (--field); there are: body, number" in asyncpp(*inputs, "--workers", "1").errors
    assert "holds Int64, no text" in asyncpp(*inputs, "--workers", "1", "--field", "number").errors


@pytest.mark.usefixtures("_small_parts")
def test_after_a_failure_the_same_command_goes_on(tmp_path: Path) -> None:
    documents = some_documents(900)
    write_lines(tmp_path / "in.jsonl", documents)
    good = (tmp_path / "in.jsonl").read_bytes()
    (tmp_path / "in.jsonl").write_bytes(good[:-2] + b"!" + good[-1:])
    inputs = ["data", "prepare", tmp_path / "in.jsonl", "--tokenizer", "bytes", "--out", tmp_path / "out"]
    ended = asyncpp(*inputs, "--workers", "2")
    assert ended.code == 2
    assert "in.jsonl, line 900: not JSON" in ended.errors
    (tmp_path / "in.jsonl").write_bytes(good)
    assert asyncpp(*inputs, "--workers", "2").code == 0
    assert sum(map(len, written_tokens(tmp_path / "out").values())) == len("".join(documents).encode()) + 900


def test_a_folder_of_something_else_or_of_another_order_is_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", some_documents(20))
    inputs = ["data", "prepare", tmp_path / "in.jsonl", "--tokenizer", "bytes", "--workers", "1", "--out"]
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.tex").write_text("years of work")
    assert "holds something else" in asyncpp(*inputs, taken).errors
    assert asyncpp(*inputs, tmp_path / "out").code == 0
    other = asyncpp(*inputs, tmp_path / "out", "--validation-share", "0.2")
    assert other.code == 2
    assert "validation_share = 0.005, not 0.2" in other.errors
    write_lines(tmp_path / "in.jsonl", some_documents(21))
    assert "from other inputs" in asyncpp(*inputs, tmp_path / "out").errors


@pytest.mark.parametrize(
    ("missing", "name", "tokenizer"),
    [
        ("tokenizers", "x.jsonl", "train:300"),
        ("polars", "x.parquet", "bytes"),
        ("zstandard", "x.txt.zst", "bytes"),
    ],
)
def test_a_missing_library_is_named_with_what_installs_it(
    missing: str, name: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / name, some_documents(5))
    monkeypatch.setitem(sys.modules, missing, None)
    ended = asyncpp("data", "prepare", tmp_path / name, "--tokenizer", tokenizer, "--out", tmp_path / "out")
    assert ended.code == 2
    assert f"needs the package {missing}" in ended.errors
    assert 'pip install "asyncpp[data]"' in ended.errors
