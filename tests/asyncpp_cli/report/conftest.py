"""Experiments that tests of reports share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import CHROMIUM, Page, browser
from support.report_experiment import ExperimentFolder, quickstart_folder


@pytest.fixture
def quickstart(tmp_path: Path) -> ExperimentFolder:
    """The six cells of the quickstart, to be changed."""
    return quickstart_folder(tmp_path / "experiment")


@pytest.fixture(scope="module")
def page(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser's page of the file that the module has `written`."""
    if CHROMIUM is None:
        pytest.skip("no chromium (apt-get install chromium)")
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        opened.open(written)
        yield opened
