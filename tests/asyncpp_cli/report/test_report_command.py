"""`asyncpp report` through the real command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import refusal, succeeded
from support.report_experiment import ExperimentFolder


@pytest.mark.slow
@pytest.mark.parametrize("output_format", ["table", "markdown", "csv", "json"])
def test_out_holds_what_standard_output_would(
    quickstart: ExperimentFolder, tmp_path: Path, output_format: str
) -> None:
    file = tmp_path / "report.txt"
    file.write_text("an older report")
    words = ("report", quickstart.folder, "--format", output_format)
    printed, written = succeeded(*words), succeeded(*words, "--out", file)
    assert (file.read_text(), written.output) == (printed.output, "")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.txt"]


def test_mistakes_are_one_line_and_exit_code_2(quickstart: ExperimentFolder) -> None:
    folder = quickstart.folder
    assert "nowhere does not exist; accepted: the folder" in refusal("report", folder / "nowhere")
    assert "is not an experiment: it has no experiment.json" in refusal("report", folder / "runs")
    assert "give the name of a file" in refusal("report", folder, "--out", folder)
    assert "cannot be written" in refusal("report", folder, "--out", folder / "no" / "such.md")


@pytest.mark.slow
def test_report_needs_no_torch(quickstart: ExperimentFolder) -> None:
    code = (
        "import sys; from pathlib import Path; "
        "from asyncpp_cli.commands.results.report import report; "
        f"report(experiments=[Path({str(quickstart.folder)!r})], output_format='json'); "
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=300)
