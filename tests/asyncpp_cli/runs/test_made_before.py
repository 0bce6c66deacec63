"""An experiment that commit 6a1d8e3 made, with diagnostics, scores and keys that are gone since then.

`tests/support/made_by_6a1d8e3` is its folder without checkpoints and logs; report.json is what that commit's
`asyncpp report --format json` printed, without what is gone and without the verdicts, which are text. The
intervals of `throughput_ratio` are those around it, as they have been since.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.command_line import succeeded

from asyncpp_cli.runs.experiment_folder import open_experiment

MADE = Path(__file__).parents[2] / "support" / "made_by_6a1d8e3"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MADE, tmp_path / "made"))


def test_its_report_is_the_same_to_the_last_digit(folder: Path) -> None:
    """Also the axis `train.diagnostics`, whose runs would otherwise be one cell."""
    cells = json.loads(succeeded("report", folder, "--format", "json").output)
    expected = json.loads((MADE / "report.json").read_text())
    kept = [{key: cell[key] for key in before} for cell, before in zip(cells, expected, strict=True)]
    assert kept == expected
    for form in ("table", "html"):
        succeeded("report", folder, "--format", form, "--out", folder.with_suffix(f".{form}"))


def test_its_status_and_runs_are_read(folder: Path) -> None:
    for record in json.loads(succeeded("status", folder, "--json").output):
        assert (record["state"], record["step"], record["core_hours"] > 0) == ("completed", 12, True)
    runs = open_experiment(folder).runs
    # Read against the hash in the id, of which a key that was set is a part.
    assert [run.config().gone for run in runs] == [{}, {"train.diagnostics": 6}] * 2
