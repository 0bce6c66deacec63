"""How errors end a command: one line and an exit code by rule, or a traceback and where to report it."""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
from pathlib import Path

import pytest
from support.command_line import asyncpp, ran, refusal
from support.files import FULL, ROOT, own_device
from support.privileges import disk, fill
from support.report_experiment import ExperimentFolder, begun, quickstart_folder, settings

from asyncpp_cli import __main__ as command
from asyncpp_cli.base.atomic_files import read_json, write_text
from asyncpp_cli.base.errors import DamagedError, UserError, doing, refusal_of
from asyncpp_cli.commands.reference import templates
from asyncpp_cli.runs.status import State, Status


@pytest.mark.parametrize(
    ("number", "code"),
    [
        *((number, 2) for number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)),
        *((number, 2) for number in (errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENODEV)),
        *((number, 1) for number in (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EMFILE, errno.ENFILE)),
        *((number, 1) for number in (errno.ENOMEM, errno.EIO, errno.EFBIG, errno.EPIPE, errno.EBADF)),
    ],
)
def test_system_errors_name_file_and_reason(number: int, code: int) -> None:
    refusal = refusal_of(OSError(number, os.strerror(number), "some/file"))
    assert refusal is not None
    assert refusal.code == code
    assert refusal.message.startswith("some/file: ")
    assert os.strerror(number) in refusal.message


def test_memory_that_a_limit_refuses_is_told_with_the_limit() -> None:
    """A folder that is listed finds no memory either, and the machine may have plenty."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = hard if hard >= 0 else 32 * 10**12
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        refusal = refusal_of(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), "folder"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert refusal is not None
    assert refusal.message == (
        "folder: Cannot allocate memory: no memory is left "
        f"(this process may have {limit / 1e9:.2g} GB: ulimit -v)"
    )


def test_the_failed_action_is_in_the_message(tmp_path: Path) -> None:
    def told(act: object) -> str:
        with pytest.raises(OSError, match=r"\[Errno") as caught:
            act()  # type: ignore[operator]
        refusal = refusal_of(caught.value)
        assert refusal is not None
        return refusal.message

    file = tmp_path / "file"
    file.touch()
    assert told((file / "in").mkdir) == f"{file}/in: Not a directory"
    assert told((tmp_path / "no").read_text) == f"{tmp_path}/no: No such file or directory"
    assert told(lambda: list(file.iterdir())) == f"{file}: Not a directory"
    # Of a file that is written beside its place, the place is named.
    assert told(lambda: write_text(file / "in", "")) == f"{file}/in cannot be written (Not a directory)"
    full = own_device(tmp_path / "full", FULL).open("wb", buffering=0)

    def write() -> None:
        with full, doing("written", "shard"):
            full.write(b"text")

    assert "shard cannot be written (No space left on device: free some space)" in told(write)


class PanicException(BaseException):
    """As libraries in Rust raise it."""


def test_what_is_no_fault_of_ours() -> None:
    for error, words, code in (
        (UserError("wrong"), "wrong", 2),
        (DamagedError("damaged"), "damaged", 2),
        (MemoryError(), "memory", 1),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "memory", 1),
        (RuntimeError("can't start new thread"), "ulimit -u", 1),
        (PanicException("Os { code: 11, message: 'Resource temporarily unavailable' }"), "ulimit -u", 1),
        (RuntimeError("Could not determine home directory."), "HOME", 2),
        (UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogates not allowed"), "a\\udcff", 2),
    ):
        refusal = refusal_of(error)
        assert refusal is not None
        assert words in refusal.message
        assert refusal.code == code
    for error in (
        PanicException("boom"),
        RuntimeError("boom"),
        KeyError("x"),
        UnicodeEncodeError("ascii", "ä", 0, 1, "no"),
    ):
        assert refusal_of(error) is None


WRONG = {
    "frobnicate": "No such command 'frobnicate' (asyncpp --help",
    "status": "Missing argument 'DIR' (asyncpp status --help",
    "status x --frob": "No such option: --frob",
    "status x y": "unexpected argument: y",
    "status a\nb\x1b[2J --frob\n\x1b": "No such option",
    "status nowhere": "nowhere does not exist; accepted: the folder of an experiment",
    "launch .": "is not an experiment: it has no experiment.json",
    "launch x --max-parallel two": "--max-parallel: accepted: a whole number",
    "launch x --max-parallel 0": "--max-parallel: accepted: 1 or more",
    "launch E --site nowhere": "--site: 'nowhere' is not known; accepted: local, slurm-gpu, testcluster",
    "report x --format tabel": "--format: 'tabel' is not known; did you mean table?",
    "report x --format docx": "--format: 'docx' is not known; accepted: table, markdown",
    "report E --format html": "--format html needs a file: --out FILE",
    "report E --out E": "give the name of a file",
    "report E --out no/such.md": "cannot be written",
    "report E --assets x": "--assets",
    "report E --caption x": "--caption",
    "report E --format latex --label }": "--label",
    "report E --rows optimiser": "--rows: optimiser: unknown key",
    "report E --cols seed": "--cols: seed: cells are averaged over it",
    "report E --best-over site.threads": "--best-over: site.threads",
    "report E --cols schedule --value loss": "--value: 'loss' is not known; did you mean val_loss?",
    "report E --target nan": "--target: 'nan', accepted: a finite number",
    "report E --for 135m": "--for MODEL and --gpus N are given together",
    "report E --device h100": "are for --for MODEL",
    "report E --for 135m --gpus 2 --device abacus": "--device",
    "diff E E/nothing": "begins with nothing",
    "diff E nowhere": "no such experiment or run",
    "export nowhere --out out": "no such experiment or run",
    "mirror nowhere --to tensorboard": "no such experiment or run",
    "mirror E --to wandb --follow": "can only be rewritten",
    "mirror E --to mlflow": "--to: 'mlflow' is not known; accepted: tensorboard, wandb\n",
    "sweep 7b": "7b is a model, not an experiment: asyncpp sweep quickstart model=7b",
    "sweep quickstrat --out out": "did you mean quickstart?",
    "sweep quickstart": "--out DIR is missing",
    "sweep quickstart --list site.gpu=abacus": "site.gpu: 'abacus' is not known",
    "templates show quickstrat": "quickstart",
    "tune quickstart --over optimizer.lr=1e-4:1e-1:log": "--out",
    "schedule show": "Missing argument",
    "optimizers show moun": "'moun' is not known; did you mean muon? accepted: sgd, adamw",
    "theory stability --momentum ema --beta 1": "beta is 1, accepted: at least 0 and below 1",
    "theory stability --momentum ema --delay -1": "delay is -1, accepted: 0 to 100",
    "theory stability --momentum none --coefficient -1": "coefficient is -1, accepted: 0 to 100",
    "theory stability --json": "--json wants one case",
    "doctor --job": "--job is for clusters",
    "doctor --dir nowhere": "no such folder",
    "doctor --site nowhere": "--site: 'nowhere' is not known",
    "plan nano3 --gpus 2": "'nano3' is not known; did you mean nano?",
    "plan 135m --bandwidth 0": "accepted: more than 0",
    "plan 360m --gpus 0": "--gpus: accepted: 1 or more",
    "plan 360m --gpus 2 --memory -1": "--memory -1",
    "plan 360m --gpus 2 --device abacus": "--device: 'abacus' is not known; accepted: h100",
    "plan 360m --gpus 2 --schedule 2bww": "--schedule: '2bww' is not known; did you mean 2bw?",
    "plan 360m --gpus 64 --tokens-per-step 1000": "no layout of 64 GPUs",
    "plan 360m model.tied=true --gpus 2 --schedule paci": "model.tied: no layout of paci has embedding",
    "plan 360m widht=3 --gpus 2": "widht: unknown key",
    "plan 360m optimizer --gpus 2": "write KEY=VALUE",
    "plan 360m --gpus 2 --profile nowhere.json": "nowhere.json: cannot be read",
    "plan 135m --gpus 1 --map": "--map --gpus 1: accepted: 2 or more",
    "plan 135m --gpus 2 --out map.svg": "--out is accepted with --map",
    "plan 135m --gpus 2 --tokens-per-step 4096 --tokens-per-step 8192": "are accepted with --map",
    "plan 135m --gpus 2 --map --tokens-per-step 1000": "no layout of 2 GPUs",
    "plan nano --gpus 2 --json --as-template chosen.yaml": "--as-template: leave out --json",
    "plan nano --gpus 2 --json --row 99": "--row: leave out --json, which does not use it",
    "plan nano --gpus 2 --map --rows 3": "--rows: leave out --map",
    "plan nano --balance --gpus 2": "--gpus: leave out --balance",
    "plan nano --gpus 2 --repeats 3": "--repeats is accepted with --measure",
}
"""Command lines that are wrong, and what is said of them; E is an experiment of completed runs."""


@pytest.fixture(scope="module")
def completed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quickstart_folder(tmp_path_factory.mktemp("completed") / "e").folder


@pytest.mark.parametrize("line", WRONG, ids=ascii)
def test_a_command_line_that_is_wrong_is_told_in_one_line(
    line: str, completed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusal(*(re.sub("^E(?=/|$)", str(completed), word) for word in line.split(" ")))
    assert (WRONG[line] in said, "\x1b" in said, list(tmp_path.iterdir())) == (True, False, []), said


def test_a_command_without_a_sub_command_shows_help() -> None:
    for arguments in ([], ["templates"]):
        ended = asyncpp(*arguments)
        assert ended.code == 2
        assert "Usage:" in ended.output + ended.errors


def test_a_fault_of_ours_shows_where_it_is_and_where_to_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("asyncpp_cli.experiment.shipped.TEMPLATE_KINDS", property(fail))
    assert templates.app is not None
    with pytest.raises(AttributeError) as caught:
        asyncpp("templates", "list")
    [note] = caught.value.__notes__
    assert "bug of asyncpp" in note
    assert "report it" in note


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"format": "x"}', "format 'x'"),
        ('{"format": true}', "format True"),
        ('{"format": 99}', "newer"),
        ("[]", "no JSON object"),
        ("\udcff", "not JSON"),
    ],
)
def test_json_of_any_kind_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(DamagedError) as caught:
        read_json(file, newest_format=1)
    assert str(file) in str(caught.value)
    assert words in str(caught.value)
    file.rename(tmp_path / "experiment.json")
    ended = asyncpp("status", tmp_path)
    assert (ended.code, ended.errors.count("\n")) == (2, 1)


def test_a_file_that_grows_too_large_is_named(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        ended = asyncpp("sweep", "quickstart", "--out", tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended.code == 1
    assert "config.yaml cannot be written (File too large" in ended.errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command", [("data", "prepare", "--tokenizer", "bytes"), ("mirror", "--to", "tensorboard")]
)
def test_a_folder_that_a_full_disk_leaves_unfilled_is_named(tmp_path: Path, command: tuple[str, ...]) -> None:
    pending = Status(state=State.PENDING)
    begun(ExperimentFolder(tmp_path / "e").add(settings("1f1b", "muon"), status=pending))
    (tmp_path / "text.txt").write_text("a line of text\n" * 10_000)
    source = tmp_path / ("text.txt" if command[0] == "data" else "e")
    with disk(tmp_path / "disk", megabytes=1) as small:
        fill(small)
        ended = asyncpp(*command, source, "--out", small / "x")
    assert f"{small / 'x'} cannot be written (No space left on device: free some space)" in ended.errors
    assert ended.code == 1


def ended(command: str) -> tuple[int, str]:
    """Exit code and standard error of a shell command, in which `asyncpp` is this one."""
    done = ran("/bin/sh", "-c", command.replace("asyncpp", f"{sys.executable} -m asyncpp_cli"))
    return done.code, done.errors


@pytest.mark.slow
def test_outputs_that_are_closed_or_full(tmp_path: Path) -> None:
    code, errors = ended("asyncpp templates list >&-")
    assert (code, errors.count("\n")) == (1, 1)
    assert "standard output cannot be written (Bad file descriptor" in errors
    full = own_device(tmp_path / "full", FULL)
    code, errors = ended(f"asyncpp templates list >{full}")
    assert (code, errors.count("\n")) == (1, 1)
    assert "standard output cannot be written (No space left" in errors
    # As with any command before `head`: it is silent.
    assert ended("{ asyncpp templates list; echo $? >&2; } | true") == (0, "1\n")
    # That nobody can be told is no reason to fail.
    assert ended(f"asyncpp --version >/dev/null 2>{full}") == (0, "")
    assert ended("asyncpp frobnicate 2>&-") == (2, "")


LIMITED = """
import resource, sys
from pathlib import Path
from asyncpp_cli.main import main

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[1]) << 20),) * 2)
sys.argv = ["asyncpp", *sys.argv[2:]]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [["sweep", "quickstart", "--list"], ["report", "nowhere"]])
def test_a_library_that_memory_does_not_hold_is_no_bug(words: list[str]) -> None:
    # Room for Python's own modules: it is numpy's library, or polars', that is not held.
    done = ran(sys.executable, "-c", LIMITED, "40", *words)
    assert (done.code, done.errors.count("\n")) == (1, 1), done
    assert "memory" in done.errors
    assert "(this process may have" in done.errors


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [600, 1100])
def test_a_library_that_ends_the_process_without_memory_is_not_begun(megabytes: int) -> None:
    """polars printed a Rust backtrace."""
    done = ran(
        sys.executable, "-c", LIMITED, str(megabytes), "report", ROOT / "tests/support/made_by_6a1d8e3"
    )
    assert (done.code, done.output, done.errors.count("\n")) == (1, "", 1), done
    assert "asyncpp: error: there is not enough memory for it (this process may have" in done.errors


def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "asyncpp_cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "asyncpp_cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 130
