"""Every command that people type, where the system refuses something: one line, and a code by rule."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.files import ROOT
from support.privileges import NOBODY, permitted
from support.report_experiment import ExperimentFolder, begun, settings

from asyncpp_cli.runs.status import State, Status

SCRIPT = ROOT / "tests" / "support" / "every_command.py"
PRIVATE = "unshare -m --propagation private"

NO_HOME = "env -u HOME -u USER -u LOGNAME -u XDG_CACHE_HOME -u XDG_CONFIG_HOME"

ENVIRONMENTS = {
    # name: what the folder goes through, what the commands run under, kind of `every_command`
    "plain": ("", "", "plain"),
    "closed": ("", "", "closed"),
    "no home, ascii": ("", f"{NOBODY} {NO_HOME} PYTHONIOENCODING=ascii LC_ALL=C", "plain"),
    "read-only": ("mount --bind {0} {0} && mount -o remount,bind,ro {0} && ", "", "read-only"),
    "full": ("mount -t tmpfs -o size=2m none {0} && cp -r {0}.copy/. {0} && ", "", "full"),
}


@dataclass(frozen=True)
class Ended:
    """The experiment's folder, and how each command ended."""

    folder: Path
    commands: list[dict[str, Any]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ended]]:
    """Every command in an environment. Those that may share a process run when the first is asked for."""
    with tempfile.TemporaryDirectory() as outer:
        # Any user may go there.
        Path(outer).chmod(0o755)
        known: dict[str, Ended] = {}

        def of(environment: str) -> Ended:
            mounting, under, _ = ENVIRONMENTS[environment]
            if environment not in known:
                shared = [
                    name
                    for name, (other_mounting, other_under, _) in ENVIRONMENTS.items()
                    if (bool(other_mounting), other_under) == (bool(mounting), under)
                ]
                known.update(run_all(shared, Path(outer), results=tmp_path_factory.mktemp("results")))
            return known[environment]

        yield of


def run_all(environments: Sequence[str], outer: Path, *, results: Path) -> dict[str, Ended]:
    """Run every command in these environments, in one process; they differ in kind and folder only."""
    mountings, words = "", []
    _, under, _ = ENVIRONMENTS[environments[0]]
    folders = {name: filled(outer / name.replace(" ", "-")) for name in environments}
    for name, folder in folders.items():
        mounting, _, kind = ENVIRONMENTS[name]
        if mounting:
            shutil.copytree(folder, f"{folder}.copy")
        mountings += mounting.format(folder)
        (results / name).mkdir()
        words += [folder, results / name, kind]
    if mountings and not permitted(f"{PRIVATE} sh -c {shlex.quote(mountings + 'true')}"):
        pytest.skip(f"not permitted here: {mountings}")
    if under and not permitted(f"{under} true"):
        pytest.skip(f"not permitted here: {under}")
    command = shlex.join(map(str, [sys.executable, SCRIPT, *words]))
    wrapped = shlex.split(PRIVATE) if mountings else []
    subprocess.run(
        [*wrapped, "sh", "-c", f"{mountings}exec {under} {command}"],
        env=dict(
            os.environ, OMP_NUM_THREADS="1", ASYNCPP_CACHE=str(results / "cache"), POLARS_MAX_THREADS="1"
        ),
        timeout=500,
        check=False,
        capture_output=True,
    )
    return {
        name: Ended(folder, json.loads((results / name / "ends.json").read_text()))
        for name, folder in folders.items()
    }


def filled(there: Path) -> Path:
    there.mkdir()
    made = ExperimentFolder(there / "e")
    begun(made.add(settings("1f1b", "muon"), status=Status(state=State.PENDING)))
    failed = Status(state=State.FAILED, attempt=1, step=2, steps=4, reason="rank 0 vanished")
    made.add(settings("2bw", "muon"), status=failed)
    # A text that is not there: where it could be launched, it is refused before anything trains.
    for run in made.cells[1:]:
        config = there / "e" / "runs" / run.id / "config.yaml"
        config.write_text(config.read_text().replace("path: null", "path: /no/such/text"))
    waiting = ExperimentFolder(there / "c")
    for seed in (0, 1):
        waiting.add(settings("1f1b", "adamw", seed=seed), status=Status(state=State.PENDING))
    (there / "text.txt").write_text("a line of text\n" * 2000)
    for path in (there, *there.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    return there


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.slow
def test_every_command(environment: str, ended: Callable[[str], Ended]) -> None:
    folder, ends = ended(environment).folder, ended(environment).commands
    assert ends[-1]["arguments"][0] == "status", "they ended with one of the commands"
    for end in ends:
        assert end["fault"] == "", end
        assert "Traceback" not in end["errors"], end
        assert end["code"] in (0, 1, 2), end
        if end["code"] == 2:
            assert end["errors"].count("asyncpp: error: ") == 1, end
    code = {" ".join(end["arguments"]).replace(str(folder), "DIR"): end["code"] for end in ends}
    errors = {" ".join(end["arguments"]).replace(str(folder), "DIR"): end["errors"] for end in ends}
    if environment in ("plain", "no home, ascii"):
        for words in ("status DIR/e", "report DIR/e", "sweep quickstart --out DIR/new", "logs DIR/e run-0"):
            assert code[words] == 0, errors[words]
    if environment == "closed":
        assert code["status DIR/e"] == 1
        assert "standard output cannot be written (Bad file descriptor" in errors["status DIR/e"]
    if environment in ("read-only", "full"):
        assert code["status DIR/e"] == 0
        assert code["report DIR/e"] == 0
        assert code["launch DIR/c"] == 1
        *said, following = errors["launch DIR/c"].splitlines()
        assert following.startswith("Next: ")
        assert [line.partition(" could not be started")[0] for line in said] == ["run-0", said[1]]
        reason = "Read-only file system" if environment == "read-only" else "No space left on device"
        assert code["sweep quickstart --out DIR/new"] == (2 if environment == "read-only" else 1)
        assert reason in errors["sweep quickstart --out DIR/new"]
        assert reason in errors["launch DIR/c"]
        assert reason in errors["train DIR/c/runs/run-0 --replay"]
