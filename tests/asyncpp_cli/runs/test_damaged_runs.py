"""One damaged run never blocks an experiment: it is shown as damaged, and everything else goes on."""

from __future__ import annotations

import html
import json
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from support.attempts import claimed
from support.command_line import ASYNCPP, Ended, asyncpp, ran, succeeded
from support.files import contents, edit
from support.json_values import JSON
from support.privileges import OWN_RIGHTS, permitted
from support.report_experiment import ExperimentFolder, begun, cells_of, metrics, settings

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.matrix import run_id
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import RankEnd
from asyncpp_cli.runs.attempts.repair import repair_run
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.settings import config_hash, with_settings
from asyncpp_cli.runs.status import State, Status
from stages.config.run_config import RunConfig


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    """Two completed runs."""
    return made_in(tmp_path, runs=2)


def made_in(folder: Path, *, runs: int, complete: bool = True) -> Experiment:
    """A run of 1f1b and others of 2bw, each a cell of its own, with the ids that `sweep` gives them."""
    made = ExperimentFolder(folder / "experiment")
    for number in range(runs):
        given = settings("2bw" if number else "1f1b", "muon", number / 100)
        config = RunConfig()
        config = with_settings(config, given)
        axes = {"schedule": given["schedule.name"], "optimizer": "muon", "error_feedback": number / 100}
        axes |= {"model": "nano", "seed": 0}
        pending = {"status": Status(state=State.PENDING), "rows": metrics(delay=int(number > 0))}
        run = made.add(given, axes=axes, run_id=run_id(axes, config_hash(config)), **pending)
        if complete:
            begun(run)
    return open_experiment(made.folder)


Harm = Callable[[Run], object]


def going_on(run: Run) -> None:
    """Make it an attempt of which nothing says how it ended."""
    edit(run.status_file, state="running")
    for file in ("rank-0.end.json", "outcome.json"):
        (run.attempts / "1" / file).unlink()
    file = run.attempts / "1" / "rank-0.json"
    [process] = json.loads(file.read_text())["processes"]
    edit(file, processes=[process | {"start": process["start"] + 1}])  # it has ended since


def status_of(text: str) -> Harm:
    return lambda run: run.status_file.write_text(text, errors="surrogateescape")


def changed(**fields: Any) -> Harm:
    return lambda run: edit(run.status_file, **fields)


def attempt_of(text: str) -> Harm:
    return lambda run: (going_on(run), (run.attempts / "1" / "attempt.json").write_text(text))


def rows(change: Callable[[dict[str, Any]], Mapping[str, Any] | None]) -> Harm:
    """Change every row of the metrics, or take it out."""

    def harm(run: Run) -> None:
        found = [change(json.loads(line)) for line in run.metrics_file.read_text().splitlines()]
        run.metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in found if row is not None))

    return harm


def without(**values: Any) -> Harm:
    return rows(lambda row: None if values.items() <= row.items() else row)


def every(kind: str, **values: Any) -> Harm:
    return rows(lambda row: row | values if row["kind"] == kind else row)


def another_configuration(run: Run) -> None:
    shutil.copyfile(next(run.folder.parent.glob("1f1b-*")) / "config.yaml", run.config_file)


ATTEMPT = "/attempts/1/attempt.json"
OF_STATUS: dict[str, tuple[Harm, str]] = {
    "torn status": (status_of('{"format": 1, "sta'), "/status.json"),
    "status is no text": (status_of("\udcff\udcfe"), "/status.json"),
    "format is a later one": (changed(format=2), "/status.json"),
    "unknown state": (changed(state="odd"), "/status.json"),
    "state says damaged": (changed(state="damaged"), "/status.json"),
    "attempt is huge": (changed(attempt=10**400), "/status.json"),
    "status is a folder": (lambda run: (run.status_file.unlink(), run.status_file.mkdir()), "/status.json"),
    "no attempts": (lambda run: (going_on(run), shutil.rmtree(run.attempts)), ATTEMPT),
    "no processes": (attempt_of('{"format": 1}'), ATTEMPT),
    "no json": (attempt_of("{"), ATTEMPT),
    "folder is gone": (lambda run: shutil.rmtree(run.folder), ""),
    "folder is a file": (lambda run: (shutil.rmtree(run.folder), run.folder.write_text("")), ""),
}
"""What is done to a run, and what is said of it behind the path of its folder."""

OF_END: dict[str, Harm] = {
    "metrics.jsonl: metrics.jsonl cannot be read: No such file": lambda run: run.metrics_file.unlink(),
    "metrics.jsonl: the last row of metrics.jsonl is of kind eval, not the end row": without(kind="end"),
    "metrics.jsonl: the end row of metrics.jsonl is of step 5, and the run has 4": every("end", step=5),
    "metrics.jsonl: metrics.jsonl has no row of this attempt": without(kind="start"),
    "metrics.jsonl is another run's: 'other'": every("start", run="other"),
}
"""Damages to the first and the last row of metrics, by what is said of them."""

OF_ROWS: dict[str, Harm] = {
    "metrics.jsonl: its last evaluation is of step 2, and the run has 4": without(kind="eval", step=4),
    "metrics.jsonl: the validation loss of step 2 is -3.0; losses are >= 0": every("eval", val_loss=-3.0),
    "metrics.jsonl: the training loss of step 1 is -0.5; losses are >= 0": every("step", train_loss=-0.5),
    "metrics.jsonl: its step rows have 4 where 3 is expected": without(kind="step", step=3),
    "metrics.jsonl: its step rows end after 6,144 of 8,192 tokens": without(kind="step", step=4),
    "metrics.jsonl: its step rows have 2 where 1 is expected": without(kind="step", step=1),
    "metrics.jsonl: its segments cover 2 steps after step 0, and the run has 4": without(first_step=2),
    "metrics.jsonl: its delay in the segment after step 0 is [7, 7] by stage, and its schedule's is [1, 1]": (
        every("segment", delay_max=[7, 7])
    ),
    "metrics.jsonl has a row of another form": every("segment", steady_seconds="long"),
}
"""What only those see who read all rows."""

OF_CONFIG: dict[str, Harm] = {
    "config.yaml cannot be read (No such file or directory)": lambda run: run.config_file.unlink(),
    "config.yaml is not YAML": lambda run: run.config_file.write_text("train: [1, 2"),
    "config.yaml is another run's: its settings make the hash": another_configuration,
}
DAMAGES = OF_STATUS | {said: (harm, f"/{said}") for said, harm in (OF_END | OF_ROWS | OF_CONFIG).items()}
SEEN = {
    "status": {*OF_STATUS, *OF_END, *OF_CONFIG},
    "status --json": {*OF_STATUS, *OF_END, *OF_CONFIG},
    "launch": {*OF_STATUS, *OF_END, *OF_CONFIG},
    "report": {*DAMAGES},
    "report --format markdown": {*DAMAGES},
    "report --format json": {*DAMAGES},
}
"""The damages that a command names."""

BESIDE = ("cancel", "mirror --to tensorboard", "logs 1f1b --attempt 1")
"""Commands that need none of it."""


@dataclass(frozen=True)
class Told:
    """An experiment of which all runs but the first are damaged, what each command said of it, and the first
    run's cell of the report before."""

    experiment: Experiment
    ended: dict[str, Ended]
    whole: dict[str, Any]

    @property
    def damaged(self) -> dict[str, Run]:
        return dict(zip(DAMAGES, self.experiment.runs[1:], strict=True))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    experiment = made_in(tmp_path_factory.mktemp("damaged"), runs=1 + len(DAMAGES))
    [whole, *_] = cells_of(experiment.folder)
    for run, (harm, _) in zip(experiment.runs[1:], DAMAGES.values(), strict=True):
        harm(run)
    asked = {command: command.split() for command in (*SEEN, *BESIDE)}
    ended = {name: asyncpp(command, experiment.folder, *words) for name, (command, *words) in asked.items()}
    return Told(experiment, ended, whole)


def shown(ended: Ended) -> str:
    """What a command said, without the breaks of lines and the escapes of its form."""
    return "".join(html.unescape(ended.output + ended.errors).replace("\\", "").split())


@pytest.mark.parametrize("command", SEEN)
def test_a_command_names_each_damage_that_it_sees_and_its_run(command: str, told: Told) -> None:
    ended, text = told.ended[command], shown(told.ended[command])
    assert (ended.code, "Traceback" in text) == (int(command == "launch"), False)
    said = {what: f"{told.damaged[what].id}{DAMAGES[what][1]}".replace(" ", "") for what in SEEN[command]}
    assert [what for what, words in said.items() if words not in text] == []


def test_status_and_report_count_no_damaged_run(told: Told) -> None:
    assert f"{len(OF_ROWS) + 1} completed, {len(SEEN['status'])} damaged" in told.ended["status"].output
    [whole, *others] = json.loads(told.ended["status --json"].output)
    assert whole["state"] == "completed"
    states = {what: each["state"] for what, each in zip(DAMAGES, others, strict=True)}
    assert states == dict.fromkeys(SEEN["status"], "damaged") | dict.fromkeys(OF_ROWS, "completed")
    report = json.loads(told.ended["report --format json"].output)
    cells = {run: cell for cell in report for run in cell["runs"]}
    # The first line of a report is about all its cells.
    assert cells.pop(told.experiment.runs[0].id) | {"answer": ""} == told.whole | {"answer": ""}
    for what, run in told.damaged.items():
        cell = cells[run.id]
        assert cell["status"] == ("missing" if what.startswith("folder") else "damaged"), what
        assert (cell["schedule"], cell["val_loss"], cell["gap"]) == ("2bw", None, None), what


def test_what_needs_no_damaged_run_goes_on(told: Told) -> None:
    cancelled, mirrored, logged = (told.ended[command] for command in BESIDE)
    assert (cancelled.code, mirrored.code, logged.output) == (0, 0, "a line\n")
    runs, seen = len(told.experiment.runs), len(SEEN["launch"])
    assert f"{runs - seen} of {runs} runs completed" in told.ended["launch"].errors
    for run in told.damaged.values():
        assert asyncpp("logs", told.experiment.folder, run.id, "--attempt", "1").code in (0, 2)
    assert current_status(told.experiment.runs[0]).state == State.COMPLETED


NOT_SETTLED = "metrics of a run whose end nobody has recorded"
FORBIDDEN = ("metrics.jsonl", NOT_SETTLED, "config.yaml", "status.json", ".")


@pytest.mark.parametrize("name", FORBIDDEN)
@pytest.mark.skipif(
    not permitted(shlex.join([*OWN_RIGHTS, "true"])), reason="root cannot give up its rights here"
)
def test_a_run_that_the_user_may_not_read_is_no_damaged_one(name: str, experiment: Experiment) -> None:
    first, _ = experiment.runs
    whole = first.status()
    if name == NOT_SETTLED:
        first.write_status(replace(whole, state=State.RUNNING))
        name = "metrics.jsonl"
    (first.folder / name).chmod(0)
    for command in ("status", "report", "launch"):
        ended = ran(*OWN_RIGHTS, *ASYNCPP, command, experiment.folder)
        words, seen = shown(ended), command != "launch" or name != "config.yaml"
        assert ("(Permissiondenied)" in words, "unreadable" in words) == (seen, command != "launch"), ended
        assert [word for word in ("damaged", "repair") if word in words] == [], ended
    (first.folder / name).chmod(0o700)
    assert current_status(first).state == State.COMPLETED


ONE_RUN = {
    "diff RUN WHOLE": 0,
    "train RUN --replay": 2,
    "export RUN --out OUT": 2,
    "extend RUN --steps 9 --out OUT": 2,
    "launch ALL --dry-run": 2,
}
"""Commands that read a run's configuration, and their exit codes where it is damaged."""


@pytest.mark.parametrize("command", ONE_RUN)
@pytest.mark.parametrize("what", OF_CONFIG)
def test_a_damaged_configuration_is_named_and_nothing_is_written(
    what: str, command: str, experiment: Experiment, tmp_path: Path
) -> None:
    whole, run = experiment.runs
    harm, said = DAMAGES[what]
    harm(run)
    before = contents(tmp_path)
    given = {"ALL": experiment.folder, "RUN": run.folder, "WHOLE": whole.folder, "OUT": tmp_path / "out"}
    ended = asyncpp(*(given.get(word, word) for word in command.split()))
    assert (ended.code, f"{run.id}{said}".replace(" ", "") in shown(ended)) == (ONE_RUN[command], True), ended
    assert contents(tmp_path) == before


def cells(*ids: str) -> Callable[[Path], object]:
    """Give the first cells of an experiment these ids."""

    def harm(file: Path) -> None:
        known = json.loads(file.read_text())["cells"]
        edit(file, cells=[cell | {"id": id} for cell, id in zip(known, ids, strict=False)])

    return harm


DESCRIPTIONS: dict[str, Callable[[Path], object]] = {
    "experiment.json is not JSON": lambda file: file.write_text("{"),
    "a newer asyncpp wrote it": lambda file: edit(file, format=99),
    'experiment.json: cells[0].id is "../run-1"; accepted: ': cells("../run-1"),
    'experiment.json: cells[0].id is "run-0\\n"; accepted: ': cells("run-0\n"),
    "experiment.json: cells[1].id is run-0, which is an earlier cell's": cells("run-0", "run-0"),
}
"""Damages to an experiment's description, by what is said of them."""

OF_EXPERIMENT = (
    *("status ALL", "status ALL --json", "report ALL", "diff ALL ALL", "launch ALL --replay", "cancel ALL"),
    *("launch ALL ID --failed", "remove ALL ID --yes", "logs ALL ID", "extend ALL ID --steps 9 --out OUT"),
    *("extend ALL --steps 9 --out OUT", "mirror ALL --to tensorboard"),
)


@pytest.mark.parametrize("said", DESCRIPTIONS)
def test_every_command_refuses_a_damaged_experiment(
    said: str, experiment: Experiment, tmp_path: Path
) -> None:
    DESCRIPTIONS[said](experiment.folder / "experiment.json")
    before = contents(tmp_path)
    given = {"ALL": experiment.folder, "ID": experiment.runs[0].id, "OUT": tmp_path / "out"}
    for command in OF_EXPERIMENT:
        ended = asyncpp(*(given.get(word, word) for word in command.split()))
        assert (ended.code, ended.errors.count("\n"), said in ended.errors) == (2, 1, True), (command, ended)
        assert contents(tmp_path) == before


def test_a_launch_trains_no_run_with_anothers_configuration(tmp_path: Path) -> None:
    experiment = made_in(tmp_path, runs=2, complete=False)
    first, second = (run.config_file.read_bytes() for run in experiment.runs)
    for run, content in zip(experiment.runs, (second, first), strict=True):
        run.config_file.write_bytes(content)
    ended = asyncpp("launch", experiment.folder, "--replay")
    assert ended.code == 1
    for run, other in zip(experiment.runs, reversed(experiment.runs), strict=True):
        hashes = f"its settings make the hash {other.id[-8:]}, and the id ends in {run.id[-8:]}"
        assert f"left out: {run.config_file} is another run's: {hashes}" in ended.errors
        assert not run.attempts.exists()


def test_the_settings_of_the_site_may_change(experiment: Experiment) -> None:
    file = experiment.runs[1].config_file
    before = file.read_text()
    file.write_text(before.replace("threads: 1", "threads: 2"))
    assert file.read_text() != before
    assert [cell["status"] for cell in cells_of(experiment.folder)] == ["completed"] * 2
    told = json.loads(succeeded("status", experiment.folder, "--json").output)
    assert [each["state"] for each in told] == ["completed"] * 2


@pytest.mark.parametrize("damage", OF_STATUS)
def test_a_damaged_run_can_be_set_right(experiment: Experiment, damage: str) -> None:
    run = experiment.runs[1]
    OF_STATUS[damage][0](run)
    if damage.startswith("folder"):
        with pytest.raises(UserError, match="asyncpp sweep"):
            repair_run(run)
        return
    before = run.status_file.read_bytes() if run.status_file.is_file() else None
    repair_run(run)
    status = current_status(run)
    whole = damage not in ("no attempts", "no processes", "no json")
    # What its attempt says of its end still holds.
    assert status.state == (State.COMPLETED if whole else State.INTERRUPTED)
    assert status.attempt == 1
    [kept] = run.folder.glob("status.json.damaged-*")
    assert before is None or kept.read_bytes() == before
    if not whole:
        attempt = claimed(run, processes=1, replay=True, steps=4)
        assert attempt.number == 2


def test_a_damaged_run_whose_processes_are_there_is_left_alone(experiment: Experiment) -> None:
    run = experiment.runs[1]
    run.status_file.write_text("{")
    # Its process is this one, and nothing says that it has ended.
    (run.attempts / "1" / "rank-0.end.json").unlink()
    with pytest.raises(UserError, match="still running"):
        repair_run(run)
    assert current_status(run).state == State.DAMAGED


FILES = (
    *("status.json", "metrics.jsonl", "timeline.json", "config.yaml", "attempts/1/attempt.json"),
    *("attempts/1/rank-0.json", "attempts/1/rank-0.end.json", "attempts/1/rank-0.error.json"),
    *("attempts/1/stop.json", "attempts/1/refused.json", "attempts/1/outcome.json"),
    "attempts/1/fallen.json",
)


@settings_of_hypothesis(max_examples=10, deadline=None)
@given(
    *(st.sampled_from(FILES), st.integers(0, 30), JSON),
    *(st.none() | st.binary(max_size=20), st.integers(0, 400), st.booleans()),
)
@pytest.mark.slow
def test_no_damage_to_any_file_ends_a_command(
    file: str, field: int, value: Any, raw: bytes | None, cut: int, running: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        experiment = made_in(Path(folder), runs=2)
        run = experiment.runs[1]
        if running:
            going_on(run)
        damaged = run.folder / file
        damaged.write_bytes(spoilt(damaged, field, value, raw, cut))
        commands: list[tuple[str | Path, ...]] = [
            ("status", experiment.folder),
            ("report", experiment.folder, "--format", "csv"),
            ("logs", experiment.folder, ""),
            ("launch", experiment.folder, "--oom", "--timeout"),
            ("mirror", experiment.folder, "--to", "tensorboard"),
        ]
        for arguments in commands:
            ended = asyncpp(*arguments)
            assert ended.code == 0 or (arguments[0] in ("logs", "launch") and ended.code in (1, 2)), ended
            assert "Traceback" not in ended.errors
        [whole, _] = json.loads(asyncpp("status", experiment.folder, "--json").output)
        assert whole["state"] == "completed"


def spoilt(file: Path, field: int, value: Any, raw: bytes | None, cut: int) -> bytes:
    """The file's content with a field of another kind, with bytes of any kind, or cut off."""
    content = (
        file.read_bytes() if file.exists() else b'{"reason": "x", "cause": "error", "time": 1.0, "kind": "x"}'
    )
    if raw is not None:
        return content[:cut] + raw
    first, _, rest = content.partition(b"\n")
    try:
        fields = json.loads(first)
    except ValueError:
        return content[:cut]
    names = list(fields)
    fields[names[field % len(names)]] = value
    return json.dumps(fields).encode() + b"\n" + rest


def test_the_attempt_of_a_run_says_what_is_damaged(experiment: Experiment) -> None:
    run = experiment.runs[1]
    going_on(run)
    (run.attempts / "1" / "rank-0.end.json").write_text('{"code": "x"}')
    status = current_status(run)
    assert status.state == State.FAILED
    assert Attempt(run, 1).read(RankEnd, 0) is None
