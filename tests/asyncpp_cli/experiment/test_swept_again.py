"""An experiment's folder: what `sweep` writes there, restores, extends and refuses; two sweeps at once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.command_line import Ended, asyncpp, refusal, succeeded
from support.files import contents

from asyncpp_cli.base.errors import DamagedError, UserError
from asyncpp_cli.experiment import render as experiments
from asyncpp_cli.experiment.matrix import expand
from asyncpp_cli.experiment.render import render
from asyncpp_cli.experiment.template import load
from asyncpp_cli.runs.config_file import read_config
from asyncpp_cli.runs.experiment_folder import EXPERIMENT_FILE, open_experiment
from asyncpp_cli.runs.settings import config_hash


def swept(folder: Path, *changes: str) -> Ended:
    return asyncpp("sweep", "quickstart", *changes, "--out", folder)


def ids(folder: Path) -> set[str]:
    return {cell.id for cell in open_experiment(folder).cells}


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "e"
    assert swept(folder).code == 0
    return folder


@pytest.fixture
def folder(quickstart: Path, tmp_path: Path) -> Path:
    """A copy of the swept quickstart."""
    return Path(shutil.copytree(quickstart, tmp_path / "e"))


def test_a_folder_keeps_the_users_text_beside_what_it_resolved_to(tmp_path: Path) -> None:
    text = "# why these rates\nbase: quickstart\ndata.context: 64  # short\n"
    mine, folder = tmp_path / "mine.yaml", tmp_path / "e"
    mine.write_text(text)
    succeeded("sweep", mine, "train.steps=20", "--out", folder)
    for again in (mine, folder / "template.yaml", folder / "resolved.yaml"):
        changes = [] if again.name == "resolved.yaml" else ["train.steps=20"]
        assert "0 runs added" in succeeded("sweep", again, *changes, "--out", folder).errors
        assert (folder / "template.yaml").read_text() == text
    resolved = succeeded("sweep", folder / "resolved.yaml", "--list", "--json")
    assert {each["id"] for each in json.loads(resolved.output)} == ids(folder)


@pytest.mark.slow
def test_a_sweep_shows_every_cell_and_adds_only_what_is_new(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    listed = succeeded("sweep", "quickstart", "--list")
    assert not folder.exists()
    written = succeeded("sweep", "quickstart", "--out", folder)
    assert ("GB per rank" in listed.output, "GB per rank" in written.output) == (True, False)
    cells = open_experiment(folder).cells
    assert len(cells) == 6
    assert "6 cells" in listed.output
    assert all(cell.id in shown.output for cell in cells for shown in (listed, written))
    touched = folder / "runs" / cells[0].id / "metrics.jsonl"
    touched.write_text("kept")

    succeeded("sweep", "quickstart", "--out", folder)
    assert open_experiment(folder).cells == cells
    more = swept(folder, "matrix.seed=[0,1]")
    assert "6 runs added" in more.errors
    assert "6 cells differ from the nearest run there in seed.\n" in more.errors
    assert f"Next: asyncpp launch {folder}\n" in more.errors
    assert {cell.id for cell in cells} < ids(folder)
    assert touched.read_text() == "kept"
    for run in open_experiment(folder).runs:
        assert run.id.endswith(config_hash(run.config())[:8])
    assert json.loads((folder / "experiment.json").read_text())["format"] == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["train.steps=7"], "6 cells differ from the nearest run there in train.steps"),
        (
            ["optimizer.lr=0.5", "matrix.seed=[0,3]"],
            "6 cells differ from the nearest run there in optimizer.lr; "
            "6 cells differ from the nearest run there in optimizer.lr, seed",
        ),
    ],
)
def test_a_refused_sweep_says_which_keys_make_its_ids_new(
    folder: Path, changes: list[str], told: str
) -> None:
    before = contents(folder)
    assert told in refusal("sweep", "quickstart", *changes, "--out", folder)
    assert contents(folder) == before


def test_a_folder_that_holds_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years of work")
    assert str(tmp_path) in refusal("sweep", "quickstart", "--out", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
    assert "is a file" in refusal("sweep", "quickstart", "--out", tmp_path / "thesis.tex")


def test_a_removed_run_is_restored_and_all_others_are_left_alone(folder: Path) -> None:
    whole = contents(folder)
    first, second, *_ = open_experiment(folder).runs
    second.metrics_file.write_text("kept")
    shutil.rmtree(first.folder)
    again = swept(folder)
    assert again.code == 0
    assert "0 runs added to the 6 that were there" in again.errors
    assert first.id in again.errors
    assert contents(folder) == whole | {f"runs/{second.id}/metrics.jsonl": b"kept"}


@pytest.mark.parametrize("damaged", ["", "[", "x: 1", "train: 2001-99-99", "&a [*a, *a]", "&a {train: *a}"])
def test_a_damaged_configuration_is_restored_and_kept_beside(folder: Path, damaged: str) -> None:
    run = open_experiment(folder).runs[0]
    whole = run.config_file.read_bytes()
    run.config_file.write_text(damaged)
    assert run.id in swept(folder).errors
    assert run.config_file.read_bytes() == whole
    [kept] = run.folder.glob("config.yaml.damaged-*")
    assert kept.read_text() == damaged


@pytest.mark.slow
def test_the_template_before_it_was_extended_is_accepted_and_takes_nothing_away(folder: Path) -> None:
    assert swept(folder, "matrix.seed=[0,1]").code == 0
    whole = contents(folder)
    gone = next(run for run in open_experiment(folder).runs if "-s0-" in run.id)
    shutil.rmtree(gone.folder)
    narrower = swept(folder)
    assert narrower.code == 0
    assert "(6 of them not in this template)" in narrower.errors
    assert contents(folder) == whole
    # Neither all of the one in the other nor the other way round.
    assert "another experiment" in swept(folder, "matrix.seed=[0,2]").errors
    # From its own template, all of its runs.
    shutil.rmtree(folder / "runs")
    succeeded("sweep", folder / "resolved.yaml", "--out", folder)
    assert {run.name for run in (folder / "runs").iterdir()} == ids(folder)
    assert len(ids(folder)) == 12


def test_an_experiment_without_its_description_gets_it_back(folder: Path) -> None:
    whole = contents(folder)
    (folder / "experiment.json").unlink()
    assert swept(folder).code == 0
    assert contents(folder) == whole
    (folder / "experiment.json").unlink()
    assert "another experiment" in swept(folder, "train.steps=7").errors


@pytest.mark.slow
def test_a_disk_that_is_full_before_the_last_run_leaves_no_half_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a folder that does not have its name yet are written in place, and others are replaced."""
    (tmp_path / "x").mkdir()
    folder, places = tmp_path / "x" / "e", list[str]()

    def half(file: Path, content: bytes) -> None:
        places.append(str(file))
        with file.open("wb") as opened:
            opened.write(content[: len(content) // 2 if len(places) > 3 else None])
        if len(places) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", half)
        assert "config.yaml" in swept(folder).errors
    assert len(places) == 4
    assert not list((tmp_path / "x").iterdir())
    assert swept(folder).code == 0
    monkeypatch.setattr(Path, "write_bytes", half)
    assert swept(folder, "matrix.seed=[0,1]").code == 0
    assert len(places) == 4


def at_once(*sweeps: Callable[[], object]) -> list[Exception]:
    """Start all of them together; returns what they were refused for."""
    refused: list[Exception] = []
    start = threading.Barrier(len(sweeps))

    def run(sweep: Callable[[], object]) -> None:
        start.wait()
        try:
            sweep()
        except UserError as error:
            refused.append(error)

    threads = [threading.Thread(target=run, args=(sweep,)) for sweep in sweeps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return refused


def sweep_of(folder: Path, seeds: list[int]) -> tuple[Callable[[], object], set[str]]:
    template = load("quickstart", [f"matrix.seed={seeds}"])
    cells = expand(template)
    return (
        lambda: render(template, cells, template_name="quickstart", folder=folder),
        {resolved.cell.id for resolved in cells},
    )


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.slow
def test_two_sweeps_at_once_lose_no_cell_that_either_has_added(tmp_path: Path, exists: bool) -> None:
    for trial in range(2):
        folder = tmp_path / str(trial)
        if exists:
            assert swept(folder).code == 0
        first, of_first = sweep_of(folder, [0, *range(100, 105)])
        second, of_second = sweep_of(folder, [0, *range(200, 205)])
        [refused] = at_once(first, second)
        assert "another experiment" in str(refused)
        assert ids(folder) in (of_first, of_second)
        assert all(run.config_file.is_file() for run in open_experiment(folder).runs)
        narrow, _ = sweep_of(folder, [0])
        wide, of_wide = sweep_of(folder, [0, *range(100, 105), *range(200, 205)])
        assert at_once(narrow, wide, narrow, wide) == []
        assert ids(folder) == of_wide


def test_without_locks_cells_that_another_wrote_over_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "experiment.json").read_bytes()

    def no_locks(*_: object) -> None:
        raise OSError("no locks available")

    def written_over(*given: object) -> None:
        description(*given)  # type: ignore[arg-type]
        (folder / "experiment.json").write_bytes(before)

    description = experiments._write_description
    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(experiments, "_write_description", written_over)
    assert "6 cells of this one are not in it" in refusal(
        "sweep", "quickstart", "matrix.seed=[0,1]", "--out", folder
    )


ODD = ["", "[", "{", ": ", "'", "\n", "\t", "!!int ", "null", "9" * 5000]
ODD += ["1e400", ".nan", "\x00", "\ufeff", "a" * 300, "[" * 3000, "{a: " * 500, "../", "2001-99-99"]


@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.slow
def test_any_damage_is_restored_or_refused_in_one_line(
    quickstart: Path, tmp_path: Path, data: st.DataObject
) -> None:
    shutil.rmtree(tmp_path / "e", ignore_errors=True)
    folder = Path(shutil.copytree(quickstart, tmp_path / "e"))
    run, *others = open_experiment(folder).runs
    of_run = [f"runs/{run.id}/{name}" for name in ("config.yaml", "status.json")]
    names = st.sampled_from([EXPERIMENT_FILE, "template.yaml", "resolved.yaml", *of_run])
    file = folder / data.draw(names)
    before = file.read_bytes() if file.exists() else b'{"format": 1, "state": "pending"}'
    kind = data.draw(st.sampled_from(["bytes", "gone", "folder", "link"]))
    file.unlink(missing_ok=True)
    if kind == "bytes":
        place, length = data.draw(st.integers(0, len(before))), data.draw(st.sampled_from([0, 1, 8]))
        odd = data.draw(st.sampled_from(ODD).map(str.encode) | st.binary(max_size=4))
        file.write_bytes(before[:place] + odd + before[place + length :])
    elif kind == "folder":
        file.mkdir()
    elif kind == "link":
        file.symlink_to(file.name)
    ended = swept(folder)
    assert ended.code in (0, 2), ended
    if ended.code == 2:
        assert (ended.output, ended.errors.count("\n")) == ("", 1), ended
        assert ended.errors.startswith("asyncpp: error: ")
        assert "\x1b" not in ended.errors
    for other in others:
        assert other.config_file.read_bytes() == (quickstart / "runs" / other.id / "config.yaml").read_bytes()
    if ended.code == 0 and file == run.config_file:
        assert run.config()


def test_an_unknown_section_of_a_runs_configuration_is_damage(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(":schedule:\n  name: 1f1b\n")
    with pytest.raises(DamagedError, match=r":schedule\.name"):
        read_config(file)
