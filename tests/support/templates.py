"""Small experiment templates: their cells, and runs that were trained from them, to be exported."""

from __future__ import annotations

from pathlib import Path

import yaml
from support.command_line import succeeded

from asyncpp_cli.experiment.matrix import ResolvedCell, expand
from asyncpp_cli.experiment.run_data import owners_of
from asyncpp_cli.experiment.template import load
from asyncpp_cli.runs.attempts.recorder import RunRecorder
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import Run
from stages.trainer import replay

BASE = {"model": "micro", "train": {"steps": 3}}


def cells_of(folder: Path, content: dict[str, object], *changes: str) -> list[ResolvedCell]:
    """The cells of a template with this content."""
    file = folder / "template.yaml"
    file.write_text(yaml.safe_dump(BASE | content, sort_keys=False))
    return expand(load(str(file), changes))


TINY = "{layers: 4, width: 16, heads: 4, kv_heads: 2, mlp_width: 24}"

SHARED = """
model: tiny.yaml
%s
data: {path: %s, context: 12}
parallel: {stages: %d}
schedule: {name: %s, microbatches: 4}
optimizer: {name: adamw, lr: %s, weight_decay: 0}
train: {steps: 2, microbatch_size: 1, eval_microbatches: 1}
"""


def run_of(
    folder: Path,
    text: Path,
    *,
    stages: int,
    schedule: str = "2bw",
    lr: str = "1e-2",
    init: Path | None = None,
) -> Run:
    """A run that has been trained in one process."""
    model = "" if init is None else f"model.init: '{init}'"
    folder.mkdir()
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "template.yaml").write_text(SHARED % (model, text, stages, schedule, lr))
    succeeded("sweep", folder / "template.yaml", "--out", folder / "e")
    [run] = open_experiment(folder / "e").runs
    train(run)
    return run


def train(run: Run) -> None:
    # Not by `asyncpp train`: that takes over the process's signals.
    recorder = RunRecorder(run, attempt=1)
    replay(run.config(), recorder=recorder, checkpoints=run.checkpoints, owners=owners_of(run))
    recorder.close()
