"""DIR/PREFIX names a run in every command that takes runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import asyncpp, succeeded
from support.launches import launch_in_this_process, sweep

from asyncpp_cli.runs.experiment_folder import open_experiment


@pytest.mark.slow
def test_one_name_of_a_run_works_in_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_in_this_process(monkeypatch)
    matrix = ["matrix={schedule: [1f1b, 2bw], optimizer: adamw}", "exclude=[]"]
    experiment = sweep(tmp_path / "e", *matrix, "train.steps=2", "train.checkpoint_interval=2")
    folder, (sync, late) = experiment.folder, experiment.runs
    launched = succeeded("launch", folder / "2bw", "--replay")
    assert f"1 of 1 runs completed in {folder}\nNext: asyncpp report {folder} " in launched.errors
    assert (sync.status().attempt, late.status().attempt) == (0, 1)
    succeeded("train", folder / "1f1b", "--replay")
    assert sync.status().state == "completed"
    succeeded("logs", folder / "2bw", "--attempt", "1")
    assert "1f1b" in asyncpp("diff", folder / "1f1b", folder / "2bw").output
    succeeded("export", folder / "1f1b", "--out", tmp_path / "weights")
    longer = asyncpp("extend", folder / "1f1b", "--steps", "4", "--out", tmp_path / "longer")
    assert (longer.code, len(open_experiment(tmp_path / "longer").runs)) == (0, 1)
    assert "Cancelled: 0 queued" in asyncpp("cancel", folder / "1f1b").errors
    # From inside of the experiment, and by the folder of the run.
    monkeypatch.chdir(folder)
    for count, name in enumerate(("1f1b", sync.folder)):
        succeeded("export", name, "--out", tmp_path / f"again-{count}")
    assert "runs of one experiment" in asyncpp("logs", folder, tmp_path / "longer" / "1f1b").errors
    assert "names 2 runs" in asyncpp("logs", folder).errors
    assert "no runs named" in asyncpp("remove", folder, "--yes").errors
    assert "no such run" in asyncpp("remove", folder / "gpipe", "--yes").errors
    succeeded("remove", folder / "1f1b", "--yes")
    assert [run.id for run in open_experiment(folder).runs] == [late.id]
