"""Experiments that tests of reports share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.report_experiment import ExperimentFolder, quickstart_folder


@pytest.fixture
def quickstart(tmp_path: Path) -> ExperimentFolder:
    """The six cells of the quickstart, to be changed."""
    return quickstart_folder(tmp_path / "experiment")
