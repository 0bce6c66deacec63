"""`asyncpp data prepare`: what it cannot read, or must not write over, it refuses by file and place."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import zstandard
from support.command_line import ASYNCPP, asyncpp, ran, refusal
from support.privileges import NOBODY, permitted
from support.texts import some_documents, write_lines, write_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")


def break_line(file: Path) -> None:
    lines = file.read_text().splitlines()
    lines[2] = "{" + lines[2][2:]
    file.write_text("\n".join(lines))


PACK = {
    "gz": partial(gzip.compress, mtime=0),
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "zst": zstandard.compress,
}
UTF_16 = "a\nb".encode("utf-16"), "a\nb".encode("utf-16-le")


@pytest.mark.parametrize(
    ("name", "damage", "arguments", "says"),
    [
        ("x.jsonl", break_line, [], ["x.jsonl, line 3: not JSON"]),
        ("x.jsonl", None, ["--field", "body"], ["x.jsonl, line 1: no field 'body'", "id, text"]),
        ("x.jsonl", None, ["--field", "id"], ["x.jsonl, line 1: the field 'id' is not text"]),
        ("x.txt", b"a\nb\nc\xff\n", [], ["x.txt, line 3: not UTF-8"]),
        ("x.txt", b"a\rb\rc\xff\r", [], ["x.txt, line 3: not UTF-8"]),
        ("x.txt", UTF_16[0], [], ["line 1: not UTF-8", "iconv"]),
        ("x.txt", UTF_16[1], [], ["x.txt is not text"]),
        ("x.txt", b"", [], ["is empty"]),
        ("x.txt", b"\n\n", [], ["hold no text"]),
        ("x.txt", Path.unlink, [], ["x.txt does not exist", "pattern"]),
        ("x.jsonl", b"[" * 100_000, [], ["x.jsonl, line 1: not JSON"]),
        ("x.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-3], [], ["x.jsonl.gz cannot be read"]),
        ("x.txt.xz", lzma.compress(b"text" * 99)[:-9], [], ["x.txt.xz cannot be read"]),
        ("x.txt.zst", zstandard.compress(b"text" * 9)[:-5], [], ["middle of a stream"]),
        ("x.txt.zst", b"no zstandard at all", [], ["x.txt.zst cannot be read"]),
        *((f"x.txt.{way}", PACK[way](b"a") + bytes(5), [], ["cannot be"]) for way in ("xz", "bz2", "zst")),
        *((f"x.txt.{way}", pack(b"a") + b"b" * 9, [], ["cannot be read"]) for way, pack in PACK.items()),
        *((f"x.txt.{way}", pack(b"a") + b"b", [], ["cannot be read"]) for way, pack in PACK.items()),
        *((f"x.txt.{way}", pack(b"a\0" * 9), [], ["not text: it has a zero"]) for way, pack in PACK.items()),
        *((f"x{way}.txt", pack(b"text" * 9), [], ["compressed or an archive"]) for way, pack in PACK.items()),
        ("x.jsonl", b"PK\3\4" + bytes(40), [], ["x.jsonl is compressed or an archive", ".zst"]),
        ("x.parquet", b"PAR1 is not enough", [], ["x.parquet cannot be read as Parquet"]),
        ("x.jsonl", None, ["--tokenizer", "bpe"], ["--tokenizer bpe", "accepted: bytes"]),
        ("x.jsonl", None, ["--tokenizer", "train:300"], ["train:300", "docs/data.md"]),
        ("x.jsonl", None, ["--separator", "a\rb"], ["--separator must be one line"]),
        ("x.jsonl", None, ["--start-of-document", "<s>"], ["tokenizer.json has no token <s>"]),
        ("x.jsonl", None, ["--tokenizer", "bytes", "--start-of-document", "<s>"], ["--start-of-document"]),
        ("x.jsonl", None, ["--end-of-document", "<end>"], ["tokenizer.json has no token <end>"]),
        ("x.jsonl", None, ["--validation-share", "1"], ["--validation-share is 1"]),
        ("x.jsonl", None, ["--workers", "0"], ["--workers: accepted: 1 or more"]),
    ],
)
def test_an_unreadable_value_is_refused_by_file_and_place(
    name: str, damage: bytes | Callable[[Path], object], arguments: list[str], says: list[str], tmp_path: Path
) -> None:
    file = tmp_path / name
    write_lines(file, some_documents(5))
    write_tokenizer(tmp_path / "tokenizer.json")
    if isinstance(damage, bytes):
        file.write_bytes(damage)
    elif damage is not None:
        damage(file)
    words = ["--tokenizer", tmp_path / "tokenizer.json", "--workers", "1", "--out", tmp_path / "out"]
    said = refusal("data", "prepare", file, *words, *arguments)
    assert [words for words in says if words not in said] == []


def test_a_tokenizer_without_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("text")
    model = {"type": "BPE", "vocab": {}, "merges": []}
    (tmp_path / "t.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    words = ["--tokenizer", tmp_path / "t.json", "--out", tmp_path / "out", "--workers", "1"]
    assert "t.json has no token <|endoftext|>" in refusal("data", "prepare", tmp_path / "x.txt", *words)


def test_a_parquet_column_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    import polars

    polars.DataFrame({"body": ["a"], "number": [1]}).write_parquet(tmp_path / "x.parquet")
    inputs = ["data", "prepare", tmp_path / "x.parquet", "--tokenizer", "bytes", "--out", tmp_path / "out"]
    assert "no column 'text' (--field); columns: body, number" in asyncpp(*inputs, "--workers", "1").errors
    assert "is Int64, not text" in asyncpp(*inputs, "--workers", "1", "--field", "number").errors


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", some_documents(20))
    inputs = ["data", "prepare", tmp_path / "in.jsonl", "--tokenizer", "bytes", "--workers", "1", "--out"]
    assert "name a new or empty folder" in refusal(*inputs, tmp_path)


@pytest.mark.parametrize(
    ("missing", "name", "tokenizer"),
    [("tokenizers", "x.jsonl", "t.json"), ("zstandard", "x.txt.zst", "bytes")],
)
def test_a_missing_library_is_named_with_what_installs_it(
    missing: str, name: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / name, some_documents(5))
    monkeypatch.setitem(sys.modules, missing, None)
    (tmp_path / "t.json").write_text("{}")
    chosen = tokenizer if tokenizer == "bytes" else tmp_path / tokenizer
    said = refusal("data", "prepare", tmp_path / name, "--tokenizer", chosen, "--out", tmp_path / "out")
    assert f"needs the package {missing}" in said
    assert 'pip install ".[data]"' in said


def test_an_empty_input_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.txt").write_text("some text\n" * 100)
    monkeypatch.chdir(tmp_path)
    said = refusal("data", "prepare", "", "--tokenizer", "bytes", "--out", "out")
    assert "an INPUT is empty" in said
    assert not Path("out").exists()


MOST = {
    f"data inspect d --samples {10**12}": "10000",
    f"data prepare d --tokenizer bytes --out out --workers {10**12}": "4096",
    f"tune quickstart --over optimizer.lr=1:2 --dry-run --samples {10**12}": "10000",
    f"launch e --until {10**24}": "9007199254740992",
}


@pytest.mark.parametrize("command", MOST)
def test_a_number_that_is_too_large_is_refused_with_what_is_accepted(command: str) -> None:
    assert f"accepted: {MOST[command]} or less (" in refusal(*command.split())


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.parquet"])
def test_a_text_with_the_token_that_ends_a_document_is_refused_by_place(name: str, tmp_path: Path) -> None:
    """A null character of bytes; of other tokenizers a word, if that was chosen as the end."""
    import polars

    texts = ["first", "second\nline", "\n" * 2000 + "before the end", "last"]
    for bad, options in (
        ("\0", ["--tokenizer", "bytes"]),
        ("o", ["--tokenizer", tmp_path / "t.json", "--end-of-document", "o"]),
    ):
        write_tokenizer(tmp_path / "t.json")
        given = [text.replace("end", f"e{bad}") for text in texts]
        write_lines(tmp_path / "x.jsonl", given)
        (tmp_path / "x.txt").write_text("\n<|endoftext|>\n".join(given))
        polars.DataFrame({"text": given}).write_parquet(tmp_path / "x.parquet")
        words = [tmp_path / name, *options, "--out", tmp_path / "out", "--workers", "1"]
        said = refusal("data", "prepare", *words)
        place = {"x.txt": "line 2006", "x.jsonl": "line 3", "x.parquet": "row 3"}[name]
        if bad == "\0":
            assert f"{name}, {place}: {bad!r} behind " in said
            assert "before the e' is token 0" in said
        assert "which begins or ends documents" in said
        assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.skipif(not permitted(f"{NOBODY} true"), reason="no other user is permitted here")
def test_workers_for_which_no_thread_can_be_started_end_in_a_line() -> None:
    user = NOBODY.replace("54321", "54323").split()
    with tempfile.TemporaryDirectory() as outer:
        Path(outer).chmod(0o777)
        Path(outer, "text.txt").write_text("a line of text\n" * 1000)
        words = ["data", "prepare", "text.txt", "--tokenizer", "bytes", "--out", "out", "--workers", "2"]
        own = os.environ | {"HOME": outer, "OPENBLAS_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
        # Three: the command, what follows its semaphores, and the first worker.
        ended = ran(*user, "prlimit", "--nproc=3", *ASYNCPP, *words, env=own, cwd=outer)
        left = [path.name for path in Path(outer).iterdir()]
    assert (ended.code, left) == (1, ["text.txt"])
    assert "Traceback" not in ended.errors
    assert "(no more processes or threads are allowed here (ulimit -u))" in ended.errors
