"""What a user names as an output stays what it is: a file, a link, a pipe, a device or a folder."""

from __future__ import annotations

import os
import shlex
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import asyncpp, ran, refusal, succeeded
from support.files import FULL, NULL, own_device
from support.launches import ONE, TINY, sweep

EXPORT = "schedule export 1f1b --stages 2 --microbatches 2 --steps 1 --out"
DRAW = "schedule draw 1f1b --stages 2 --microbatches 2 --steps 1 --out"
MAP = "plan nano --gpus 2 --device h100 --map --out"
MEASURE = "plan nano train.microbatch_size=1 data.context=16 --repeats 1 --measure"
COMMANDS = {
    "export": f"{EXPORT} OUT",
    "draw": f"{DRAW} OUT.svg",
    "csv": "report E --format csv --out OUT",
    "map": f"{MAP} OUT.png",
    "rehearse": "rehearse E --device cpu --csv OUT",
    "measure": f"{MEASURE} OUT",
}
WRITERS = COMMANDS | {"template": "plan nano --gpus 2 --as-template OUT"}
SLOW = ("map", "rehearse", "measure")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sweep(tmp_path_factory.mktemp("swept") / "e", *ONE, "train.steps=2").folder


@pytest.fixture(autouse=True)
def devices() -> Iterator[None]:
    """The machine's own devices are what they were."""
    names = ("/dev/full", "/dev/null", "/dev/stdout")
    before = [os.lstat(name) for name in names]
    assert stat.S_ISCHR(before[0].st_mode)
    yield
    assert [os.lstat(name).st_ino for name in names] == [each.st_ino for each in before]


def words(name: str, out: Path, experiment: Path) -> list[str]:
    given = {"OUT": str(out), "OUT.svg": str(out), "OUT.png": str(out), "E": str(experiment)}
    return [given.get(word, word) for word in WRITERS[name].split()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in COMMANDS]
)
def test_pipes_devices_and_links_stay_what_they_are(name: str, swept: Path, tmp_path: Path) -> None:
    suffix = {"draw": ".svg", "map": ".png"}.get(name, ".txt")

    def run(out: Path) -> None:
        # A rehearsal ends with 1 where memory is not as planned: this model is too small for it.
        assert asyncpp(*words(name, out, swept)).code <= (name == "rehearse")

    file = tmp_path / f"file{suffix}"
    run(file)
    whole = file.read_bytes()
    same = name not in ("measure", "rehearse")  # they have times in them

    def check(content: bytes) -> None:
        assert (content == whole) if same else content[:20] == whole[:20]

    pipe = tmp_path / f"pipe{suffix}"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    run(pipe)
    reader.join(60)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    check(received[0])

    file.write_text("old")
    file.chmod(0o600)
    (tmp_path / "in").mkdir()
    for link, leads_to in (("link", file.name), ("new", "in/new"), ("twice", f"link{suffix}")):
        place, target = tmp_path / f"{link}{suffix}", tmp_path / leads_to
        place.symlink_to(leads_to)
        run(place)
        assert place.is_symlink()
        check(target.read_bytes())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not [*tmp_path.glob(".*"), *tmp_path.glob("in/.*")]

    null, full = own_device(tmp_path / f"null{suffix}", NULL), own_device(tmp_path / f"full{suffix}", FULL)
    run(null)
    ended = asyncpp(*words(name, full, swept))
    assert ended.code == 1
    assert f"{full} cannot be written (No space left on device" in ended.errors
    assert [stat.S_ISCHR(each.lstat().st_mode) for each in (null, full)] == [True, True]


@pytest.mark.parametrize("name", ["export", "draw", "csv"])
def test_what_is_neither_a_file_nor_a_stream_is_refused(name: str, swept: Path, tmp_path: Path) -> None:
    suffix = ".svg" if name == "draw" else ".txt"
    folder, listening = tmp_path / f"folder{suffix}", tmp_path / f"socket{suffix}"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(listening))
        for out in (folder, listening):
            assert "folder" in refusal(*words(name, out, swept))
    assert (folder.is_dir(), stat.S_ISSOCK(listening.lstat().st_mode)) == (True, True)


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    name: str, swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as its work has not begun a command needs none of what it works with."""
    for work in ("planner.rehearsal.rehearse", "planner.costs.measure.measured_here", "report.build.load"):
        monkeypatch.delattr(f"asyncpp_cli.{work}")
    monkeypatch.delattr("asyncpp_cli.planner.decision.decision_map")
    monkeypatch.delattr("asyncpp_cli.planner.rank.best_first")
    monkeypatch.delattr("schedules.build")
    out = tmp_path / "missing" / "out.svg"
    assert refusal(*words(name, out, swept)) == (
        f"asyncpp: error: {out} cannot be written (No such file or directory)\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_descriptor_is_written_where_it_stands(swept: Path, tmp_path: Path) -> None:
    command = shlex.join([sys.executable, "-m", "asyncpp_cli", *words("csv", Path("OUT"), swept)])
    file, stdout = tmp_path / "file", tmp_path / "stdout"
    stdout.symlink_to("/proc/self/fd/1")  # as /dev/stdout
    for out, redirected in ((stdout, f">>{file}"), ("/dev/fd/3", f"3>>{file}"), (stdout, f"| cat >>{file}")):
        file.write_text("before\n")
        script = f"{command.replace('OUT', str(out))} {redirected}"
        done = ran("sh", "-c", script, cwd=tmp_path)
        assert (done.code, done.output) == (0, ""), done.errors
        assert file.read_text().startswith("before\nschedule,"), done.errors
        assert stdout.is_symlink()
    done = ran("sh", "-c", f"{command.replace('OUT', str(stdout))} >&-", cwd=tmp_path)
    assert (done.code, done.errors.count("\n")) == (1, 1), done.errors


def test_folders_are_made_behind_links(swept: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    small = ["sweep", "quickstart", *TINY, "train.steps=2", "--out"]
    for target in ("empty", "new"):
        link = tmp_path / f"to-{target}"
        link.symlink_to(target)
        succeeded(*small, link)
        assert (link.is_symlink(), (tmp_path / target / "experiment.json").is_file()) == (True, True)
    (tmp_path / "text").write_text("a line\n" * 50)
    for name, command in (
        ("data", ["data", "prepare", tmp_path / "text", "--tokenizer", "bytes"]),
        ("mirror", ["mirror", swept, "--to", "tensorboard"]),
    ):
        link = tmp_path / f"to-{name}"
        link.symlink_to(name)
        succeeded(*command, "--out", link)
        assert (link.is_symlink(), (tmp_path / name).is_dir()) == (True, True)
    null = own_device(tmp_path / "null", NULL)
    assert "is a file" in refusal(*small, null)
    assert stat.S_ISCHR(null.lstat().st_mode)
