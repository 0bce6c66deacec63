"""`asyncpp report` through the real command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.command_line import asyncpp, refusal
from support.report_experiment import (
    ExperimentFolder,
    cells_of,
    report_of,
    settings,
)

from asyncpp_cli.report.formats.markdown import to_markdown
from asyncpp_cli.report.formats.records import to_json
from asyncpp_cli.report.formats.terminal import to_text
from asyncpp_cli.runs.status import State, Status

HOSTILE = "<script>alert(1)</script>|[bold]\x1b[31m`x`"


def test_names_with_markup_do_no_harm(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment", name=HOSTILE)
    failed = Status(state=State.FAILED, reason=HOSTILE)
    experiment.add(settings("2bw", "muon", **{"model.name": HOSTILE}), status=failed)
    report = report_of(experiment.folder)
    markdown = to_markdown(report)
    assert "<script>" not in markdown
    [row] = [line for line in markdown.splitlines() if line.startswith("| 2bw")]
    assert len(re.findall(r"(?<!\\)\|", row)) == len(re.findall(r"(?<!\\)\|", markdown.splitlines()[2]))
    assert "\x1b" not in to_text(report) + markdown
    assert "[bold]" in to_text(report)
    assert json.loads(to_json(report.cells))[0]["model"] == HOSTILE


@pytest.mark.slow
def test_command_writes_json_alone_to_standard_output(quickstart: ExperimentFolder) -> None:
    command = [sys.executable, "-m", "asyncpp_cli", "report", quickstart.folder, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == cells_of(quickstart.folder)


@pytest.mark.parametrize("output_format", ["table", "markdown", "csv", "json"])
@pytest.mark.slow
def test_out_holds_what_standard_output_would(
    quickstart: ExperimentFolder, tmp_path: Path, output_format: str
) -> None:
    file = tmp_path / "report.txt"
    file.write_text("an older report")
    printed = asyncpp("report", quickstart.folder, "--format", output_format)
    written = asyncpp("report", quickstart.folder, "--format", output_format, "--out", file)
    assert (printed.code, written.code) == (0, 0)
    assert written.output == ""
    assert file.read_text() == printed.output
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.txt"]


def mistakes(folder: Path) -> Mapping[str, tuple[list[str | Path], str]]:
    return {
        "no experiment": ([folder / "nowhere"], "nowhere is not an experiment"),
        "out is a folder": ([folder, "--out", folder], "give the name of a file"),
        "out has no folder": ([folder, "--out", folder / "no" / "such.md"], "cannot be written"),
    }


@pytest.mark.parametrize("mistake", ["no experiment", "out is a folder", "out has no folder"])
@pytest.mark.slow
def test_mistakes_are_one_line_and_exit_code_2(quickstart: ExperimentFolder, mistake: str) -> None:
    arguments, message = mistakes(quickstart.folder)[mistake]
    assert message in refusal("report", *arguments)


@pytest.mark.slow
def test_report_needs_no_torch(quickstart: ExperimentFolder) -> None:
    code = (
        "import sys; from pathlib import Path; "
        "from asyncpp_cli.commands.results.report import report; "
        f"report(experiments=[Path({str(quickstart.folder)!r})], output_format='json'); "
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)
