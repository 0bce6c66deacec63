"""Checkpoints written by several versions of Python and torch, kept in `tests/support/saved_by/`.

To add those of another Python, or to write them all again after a change of the format, in the repository:

    PYTHONPATH=.:tests PYTHON -m support.saved_by

It replaces the folder of that Python and torch.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from support.resumed import saving
from support.small_runs import TEXT, Rows, small_config

from stages.checkpoint import files
from stages.config.run_config import RunConfig
from stages.trainer import replay

FOLDER = Path(__file__).with_suffix("")
STEP = 2


def run_that_saves(text: Path | None = None) -> RunConfig:
    """A run that saves at `STEP`, in the middle."""
    config = saving(small_config("2bw", text=text, optimizer="muon", coefficient=1.0, layers=2), keep=2)
    return replace(config, model=replace(config.model, width=8, heads=2, kv_heads=1, mlp_width=8))


def main() -> None:
    minor = ".".join(platform.python_version_tuple()[:2])
    target = FOLDER / f"python-{minor}-torch-{version('torch').partition('+')[0]}"
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(TEXT)
        replay(run_that_saves(text), recorder=Rows(), checkpoints=Path(folder) / "c")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(files.folder_of(Path(folder) / "c", STEP), files.folder_of(target, STEP))
    print(target)


if __name__ == "__main__":
    main()
