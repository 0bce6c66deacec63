"""Commands that messages name: each message is brought about, and each command that it names is run.

Every call of `base.console.command` in the product has a case here, or a test elsewhere that runs it.
"""

from __future__ import annotations

import ast
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.attempts import claimed
from support.command_line import Ended, asyncpp, succeeded
from support.launches import ONE, TINY, launch_in_this_process, sweep

import asyncpp_cli
from asyncpp_cli.base.console import command
from asyncpp_cli.base.errors import INTERRUPTED, UserError
from asyncpp_cli.launch import start
from asyncpp_cli.launch.common.options import LaunchOptions
from asyncpp_cli.launch.start import resume_command
from asyncpp_cli.runs.attempts.repair import repair_run
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.processes import process_id
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status
from asyncpp_cli.tune import tuning

PRODUCT = Path(asyncpp_cli.__file__).parent
Check = Callable[[], bool]
"""Whether the commands have helped."""
SHORT = [*ONE, "train.steps=2", "site.device=cpu"]


def made(tmp_path: Path, *changes: str, train: bool = False) -> tuple[Path, Run]:
    folder = tmp_path / "an experiment"
    run = sweep(folder, *SHORT, *changes).runs[0]
    if train:
        succeeded("train", run.folder, "--replay")
    return folder, run


def running(run: Run) -> None:
    """Begin an attempt whose process ends when it is asked to stop."""
    attempt = claimed(run, processes=1, replay=True, steps=2)
    # Its parent ends first, so that it is gone as soon as it has ended.
    until = f"while ! test -e {shlex.quote(str(attempt.folder))}/stop.json; do sleep 0.1; done"
    begin = ["sh", "-c", '(sh -c "$0" > /dev/null & echo $!)', until]
    ended = subprocess.run(begin, check=True, text=True, stdout=subprocess.PIPE)
    attempt.record_start(0, process_id(int(ended.stdout)))


def state_of(folder: Path) -> set[str]:
    return {record["state"] for record in json.loads(succeeded("status", folder, "--json").output)}


def sweep_and_launch(tmp_path: Path) -> tuple[list[Ended], Check]:
    said = asyncpp("sweep", "quickstart", *TINY, *SHORT, "--out", tmp_path / "e")
    return [said], lambda: state_of(tmp_path / "e") == {"completed"}


def a_gpu_is_needed(tmp_path: Path) -> tuple[list[Ended], Check]:
    changes = [*TINY, *SHORT, "site.device=cuda", "--out", tmp_path / "e"]
    said = asyncpp("sweep", "quickstart", *changes)
    return [replace(said, errors=said.errors.partition("Next: ")[2].partition("\n")[2])], lambda: True


def rehearsed(tmp_path: Path) -> tuple[list[Ended], Check]:
    folder, _ = made(tmp_path)
    said = asyncpp("launch", folder, "--dry-run", "--replay")
    assert "--replay" in said.errors.rpartition("Next: ")[2]
    return [said], lambda: state_of(folder) == {"completed"}


def not_completed(tmp_path: Path) -> tuple[list[Ended], Check]:
    folder, _ = made(tmp_path, "train.eval_interval=1")
    said = asyncpp("launch", folder, "--until", "1", "--replay")
    assert said.errors.endswith("--replay\n")
    return [said], lambda: state_of(folder) == {"completed"}


def is_completed(tmp_path: Path) -> tuple[list[Ended], Check]:
    folder, _ = made(tmp_path)
    said = asyncpp("launch", folder, "--replay")
    return [said], lambda: "<html" in Path("report.html").read_text()


def has_failed(tmp_path: Path) -> tuple[list[Ended], Check]:
    folder, run = made(tmp_path)
    run.checkpoints.touch()  # in the way of what a run writes; then it is not
    said = asyncpp("launch", folder)
    run.checkpoints.unlink()
    assert state_of(folder) == {"failed"}
    return [said], lambda: state_of(folder) == {"completed"}


def is_damaged(tmp_path: Path) -> tuple[list[Ended], Check]:
    folder, run = made(tmp_path, train=True)
    run.status_file.write_text("{")
    said = asyncpp("launch", folder)
    assert "--failed" in said.errors
    return [said], lambda: state_of(folder) == {"completed"}


def rows_are_lost(tmp_path: Path) -> tuple[list[Ended], Check]:
    folder, run = made(tmp_path, train=True)
    run.metrics_file.unlink()
    run.write_status(replace(run.status(), state=State.INTERRUPTED))
    return [asyncpp("train", run.folder, "--replay")], lambda: state_of(folder) == {"completed"}


def a_configuration_is_damaged(tmp_path: Path) -> tuple[list[Ended], Check]:
    folder, run = made(tmp_path)
    run.config_file.write_text("{")
    launched, repaired = asyncpp("launch", folder), asyncpp("launch", folder, "--failed")
    assert "restore: " in launched.errors
    run.status_file.write_text("{")
    with pytest.raises(UserError) as damaged:
        repair_run(run)
    said = Ended(2, "", str(damaged.value))
    return [launched, repaired, said], lambda: asyncpp("launch", folder, "--replay", "--failed").code == 0


def a_folder_is_gone(tmp_path: Path) -> tuple[list[Ended], Check]:
    folder, run = made(tmp_path)
    shutil.rmtree(run.folder)
    said = [asyncpp("launch", folder), asyncpp("launch", folder, run.id)]
    return said, lambda: asyncpp("launch", folder, "--replay").code == 0


def ranks_are_missing(tmp_path: Path) -> tuple[list[Ended], Check]:
    folder, run = made(tmp_path)
    return [asyncpp("train", run.folder)], lambda: state_of(folder) == {"completed"}


def nothing_to_retry(tmp_path: Path) -> tuple[list[Ended], Check]:
    folder, _ = made(tmp_path)
    said = [asyncpp("launch", folder, "--oom"), asyncpp("remove", folder), asyncpp("cancel", folder, "x")]
    return said, lambda: True


def extended(tmp_path: Path) -> tuple[list[Ended], Check]:
    folder, _ = made(tmp_path, train=True)
    new = tmp_path / "new"
    said = asyncpp("extend", folder, "--steps", "4", "--out", new)
    return [said], lambda: state_of(new) == {"completed"}


def nothing_would_change(tmp_path: Path) -> tuple[list[Ended], Check]:
    folder, _ = made(tmp_path, "train.eval_interval=1")
    succeeded("launch", folder, "--until", "1", "--replay")
    said = asyncpp("extend", folder, "--steps", "2", "--out", tmp_path / "new")
    return [said], lambda: state_of(folder) == {"completed"}


def it_is_running(tmp_path: Path) -> tuple[list[Ended], Check]:
    folder, run = made(tmp_path, "matrix.seed=[0,1]")
    running(run)
    said = [asyncpp("extend", folder, run.id, "--steps", "4", "--out", tmp_path / "new")]
    said += [asyncpp("remove", folder, run.id, "--yes")]
    return said, lambda: state_of(folder) == {"interrupted", "pending"}


def a_tuning_goes_on(tmp_path: Path) -> tuple[list[Ended], Check]:
    folder = tmp_path / "tuned"
    question = ["tune", "quickstart", *TINY, *SHORT, "train.steps=4", "--over", "optimizer.lr=[1e-3,2e-3]"]
    question += ["--rungs", "0.5", "--replay", "--out", folder]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "launch_locally", lambda *_: INTERRUPTED)
        asyncpp(*question)
    other = asyncpp(*question[:-1], folder, "--rungs", "0.25")
    early = asyncpp("extend", folder, "--best", "--steps", "8", "--out", tmp_path / "new")
    run = open_experiment(folder).runs[0]
    succeeded("remove", folder, run.id, "--yes")
    return [asyncpp("tune", folder), other, early], lambda: "best" in succeeded("report", folder).output


def a_schedule_that_cannot_run(tmp_path: Path) -> tuple[list[Ended], Check]:
    file = tmp_path / "mine.txt"
    program = succeeded("schedule", "export", "1f1b", "--stages", "2", "--microbatches", "2").output
    file.write_text(program.replace(" 0B0@0", ""))
    said = asyncpp("schedule", "show", file)
    return [said], lambda: True


def quickstart(tmp_path: Path) -> tuple[list[Ended], Check]:
    patch = pytest.MonkeyPatch()
    patch.setattr(start, "launch_locally", lambda *_, **_told: 0)  # it takes five minutes
    return [asyncpp("quickstart", "--out", tmp_path / "e")], lambda: patch.undo() is None


CASES = [
    *(sweep_and_launch, a_gpu_is_needed, rehearsed, not_completed, is_completed, has_failed, is_damaged),
    *(
        rows_are_lost,
        a_configuration_is_damaged,
        a_folder_is_gone,
        ranks_are_missing,
        nothing_to_retry,
        extended,
    ),
    *(nothing_would_change, it_is_running, a_tuning_goes_on, a_schedule_that_cannot_run, quickstart),
]
ELSEWHERE = {
    "launch/cluster.py:_say_next_commands: status": "cluster/test_cluster_words.py",
    "launch/cluster.py:_say_next_commands: cancel": "cluster/test_cluster_failures.py",
    "launch/start.py:launch_on_cluster: status": "cluster/test_cluster_words.py",
    "launch/start.py:launch_on_cluster: cancel": "cluster/test_cluster_failures.py",
    "tune/tuning.py:_on_cluster: status": "cluster/test_cluster_tune.py",
    "tune/tuning.py:submit_due: tune --site": "cluster/test_cluster_tune.py",
    "launch/start.py:_say_interrupted: cancel": "asyncpp_cli/launch/test_two_launchers.py",
    "launch/start.py:resume_command: launch": "asyncpp_cli/commands/test_hints.py",
    "launch/start.py:resume_command: tune": "asyncpp_cli/commands/test_hints.py",
    "report/analysis/further_runs.py:in_further_lengths: sweep --out": "asyncpp_cli/report/test_verdict.py",
    "report/analysis/further_runs.py:in_further_lengths: report": "asyncpp_cli/report/test_verdict.py",
    "report/analysis/further_runs.py:sweep_and_launch: sweep --out": "asyncpp_cli/report/test_verdict.py",
    "report/analysis/further_runs.py:launching: launch": "asyncpp_cli/report/test_verdict.py",
    "report/analysis/summary.py:_remedy: sweep --out": "asyncpp_cli/report/test_verdict.py",
    "report/analysis/summary.py:_slowest_sentences: plan --balance": (
        "asyncpp_cli/planner/test_measured_balance.py"
    ),
}
"""Commands that need a cluster, measured or live runs or a signal, and the file of tests that run them."""


@dataclass
class Hints:
    """The commands that were made for messages, by the place in the product that made them."""

    texts: dict[str, set[str]] = field(default_factory=dict)

    def command(self, *words: str | Path) -> str:
        code = sys._getframe(1).f_code
        file = str(Path(code.co_filename).relative_to(PRODUCT))
        own = [site for site in sites() if site.startswith(f"{file}:{code.co_name}: ")]
        # Of several in a function, the one with most of these words.
        constants = {site: site.rpartition(": ")[2].split() for site in own}
        fitting = [site for site in own if set(constants[site]) <= set(map(str, words))]
        site = max(fitting, key=lambda site: len(constants[site]))
        text = command(*words)
        self.texts.setdefault(text, set()).add(site)
        return text


def sites() -> set[str]:
    """Every call of `command` in the product: file, function, and the words that are always the same."""
    found = set()
    for file in PRODUCT.rglob("*.py"):
        if "import command" not in file.read_text() and ", command" not in file.read_text():
            continue
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                if (
                    isinstance(call, ast.Call)
                    and isinstance(call.func, ast.Name)
                    and call.func.id == "command"
                ):
                    words = [each.value for each in call.args if isinstance(each, ast.Constant)]
                    if words:
                        place = f"{file.relative_to(PRODUCT)}:{function.name}"
                        found.add(f"{place}: {' '.join(map(str, words))}")
    return found


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hints]:
    """What messages name from now on."""
    hints = Hints()
    for name, module in list(sys.modules.items()):
        if name.startswith("asyncpp_cli") and vars(module).get("command") is command:
            monkeypatch.setattr(module, "command", hints.command)
    return hints


@pytest.mark.slow
def test_every_command_that_a_message_names_can_be_run_and_helps(
    hints: Hints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_in_this_process(monkeypatch)
    run = set(ELSEWHERE)
    for case in CASES:
        folder = tmp_path / case.__name__
        folder.mkdir()
        monkeypatch.chdir(folder)
        hints.texts.clear()
        messages, helped = case(folder)
        said = " ".join(f"{message.output}{message.errors}" for message in messages)
        named = {}
        for text in sorted(hints.texts, key=len, reverse=True):  # one may begin as another does
            if text in said:
                named[text] = hints.texts[text]
                said = said.replace(text, "")
        assert named, (case, said)
        for text, where in named.items():
            ended = asyncpp(*shlex.split(text)[1:])
            # Two commands are to say what is wrong.
            assert ended.code <= 2 * ("schedule check" in text) + ("rehearse" in text), (case, text, ended)
            run |= where
        assert helped(), case
    assert sites() == run


def test_what_was_swept_for_a_site_is_launched_there(tmp_path: Path) -> None:
    made = succeeded("sweep", "quickstart", *TINY, *ONE, "--site", "slurm-gpu", "--out", tmp_path / "e")
    hint = shlex.split(made.errors.rpartition("Next: ")[2].partition("\n")[0])
    assert hint == ["asyncpp", "launch", str(tmp_path / "e"), "--site", "slurm-gpu"]


def test_a_folder_that_begins_with_a_dash_is_no_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = asyncpp("sweep", "quickstart", *TINY, *ONE, "--out=-a dash")
    hint = shlex.split(made.errors.rpartition("Next: ")[2])
    assert hint == ["asyncpp", "launch", "./-a dash"]
    succeeded("status", *hint[2:])
    (run,) = open_experiment(Path("-a dash")).runs
    options = LaunchOptions(replay=True, max_parallel=2)
    assert (
        resume_command([run], Path("-a dash"), options)
        == "asyncpp launch './-a dash' --replay --max-parallel 2"
    )
    # What was chosen to be tried again is chosen by its name: it has not failed this time.
    options = replace(options, only=[run.id])
    again = f"asyncpp launch './-a dash' {run.id} --replay --max-parallel 2"
    assert resume_command([run], Path("-a dash"), options) == again
    # A tuning pauses its runs, too, but says nothing of a step.
    options = replace(options, pauses={run.id: 3})
    said = resume_command([run], Path("-a dash"), options)
    assert said == "asyncpp tune './-a dash' --replay --max-parallel 2"
    assert resume_command([run], Path("-a dash"), replace(options, until=3)) == f"{again} --until 3"
    here = replace(options, pauses={}, site="here.yaml")
    assert resume_command([run], Path("-a dash"), here) == f"{again} --site here.yaml"
    run.write_status(Status(state=State.FAILED))
    succeeded("status", *shlex.split(command("status", Path("-a dash")))[2:])
