"""An experiment that is swept again: extended, restored, and by two processes at once."""

from __future__ import annotations

import fcntl
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command_line import Ended, asyncpp, succeeded
from support.files import contents

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment import render as experiments
from asyncpp_cli.experiment.matrix import expand
from asyncpp_cli.experiment.render import render
from asyncpp_cli.experiment.template import load
from asyncpp_cli.runs.experiment_folder import open_experiment


def swept(folder: Path, *changes: str) -> Ended:
    return asyncpp("sweep", "quickstart", *changes, "--out", folder)


def ids(folder: Path) -> set[str]:
    return {cell.id for cell in open_experiment(folder).cells}


@pytest.mark.slow
def test_a_removed_run_is_restored_and_all_others_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    assert swept(folder).code == 0
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
@pytest.mark.slow
def test_a_damaged_configuration_is_restored_and_kept_beside(tmp_path: Path, damaged: str) -> None:
    folder = tmp_path / "e"
    assert swept(folder).code == 0
    run = open_experiment(folder).runs[0]
    whole = run.config_file.read_bytes()
    run.config_file.write_text(damaged)
    assert run.id in swept(folder).errors
    assert run.config_file.read_bytes() == whole
    [kept] = run.folder.glob("config.yaml.damaged-*")
    assert kept.read_text() == damaged


@pytest.mark.slow
def test_the_template_before_it_was_extended_is_accepted_and_takes_nothing_away(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    assert swept(folder, "matrix.seed=[0,1]").code == 0
    whole = contents(folder)
    runs = open_experiment(folder).runs
    gone = next(run for run in runs if "-s0-" in run.id)
    shutil.rmtree(gone.folder)
    narrower = swept(folder)
    assert narrower.code == 0
    assert "(6 of them not in this template)" in narrower.errors
    assert contents(folder) == whole
    # Neither all of the one in the other nor the other way round.
    assert "another experiment" in swept(folder, "matrix.seed=[0,2]").errors
    assert contents(folder) == whole


@pytest.mark.slow
def test_an_experiment_without_its_description_gets_it_back(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    assert swept(folder).code == 0
    whole = contents(folder)
    (folder / "experiment.json").unlink()
    assert swept(folder).code == 0
    assert contents(folder) == whole
    (folder / "experiment.json").unlink()
    assert "another experiment" in swept(folder, "train.steps=7").errors


@pytest.mark.slow
def test_an_experiment_can_be_swept_again_from_its_own_template(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    assert swept(folder, "matrix.seed=[0,1]").code == 0
    shutil.rmtree(folder / "runs")
    whole = ids(folder)
    succeeded("sweep", folder / "resolved.yaml", "--out", folder)
    assert {run.name for run in (folder / "runs").iterdir()} == whole == ids(folder)


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


@pytest.mark.slow
def test_without_locks_cells_that_another_wrote_over_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "e"
    assert swept(folder).code == 0
    before = (folder / "experiment.json").read_bytes()

    def no_locks(*_: object) -> None:
        raise OSError("no locks available")

    def written_over(*given: object) -> None:
        description(*given)  # type: ignore[arg-type]
        (folder / "experiment.json").write_bytes(before)

    description = experiments._write_description
    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(experiments, "_write_description", written_over)
    refused = swept(folder, "matrix.seed=[0,1]")
    assert (refused.code, refused.errors.count("\n")) == (2, 1)
    assert "6 cells of this one are not in it" in refused.errors
