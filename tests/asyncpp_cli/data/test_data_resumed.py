"""`asyncpp data prepare`: whoever does the work and however often it is interrupted, it writes the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command_line import asyncpp, refusal, succeeded
from support.texts import SHARE, prepared, some_documents, write_lines, write_tokenizer, written_tokens

from asyncpp_cli.data import parts

SMALL_PARTS = "import asyncpp_cli.data.parts as parts; parts.SMALLEST = parts.READ = 1 << 15"


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch, own_cache: None) -> None:
    """Little text makes many parts: they are cut in the process that is asked."""
    monkeypatch.setattr(parts, "SMALLEST", 1 << 15)
    monkeypatch.setattr(parts, "READ", 1 << 15)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert "is not completely prepared" in refusal("data", "inspect", out)
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


@pytest.mark.slow
def test_after_a_failure_the_same_command_goes_on(tmp_path: Path) -> None:
    documents = some_documents(900)
    write_lines(tmp_path / "in.jsonl", documents)
    good = (tmp_path / "in.jsonl").read_bytes()
    (tmp_path / "in.jsonl").write_bytes(good[:-2] + b"!" + good[-1:])
    inputs = ["data", "prepare", tmp_path / "in.jsonl", "--tokenizer", "bytes", "--out", tmp_path / "out"]
    assert "in.jsonl, line 900: not JSON" in refusal(*inputs, "--workers", "2")
    (tmp_path / "in.jsonl").write_bytes(good)
    succeeded(*inputs, "--workers", "2")
    assert sum(map(len, written_tokens(tmp_path / "out").values())) == len("".join(documents).encode()) + 900
