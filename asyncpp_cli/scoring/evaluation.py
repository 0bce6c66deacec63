"""Scores a run's checkpoints: each is exported, and a process of lm-evaluation-harness scores the export.

The run's checkpoints are only read, and its other files left alone, so it may train meanwhile.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from asyncpp_cli.base.console import say
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.run_data import owners_of
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.scores import FILE, Score, add_scores, scores_of
from asyncpp_cli.runs.status import State
from asyncpp_cli.scoring.exported import export_run
from asyncpp_cli.scoring.harness import Answer, Request
from stages.checkpoint.files import MANIFEST, folder_of, saved_steps
from stages.config.records import encoded, read_record

LOG = "evaluate.log"
"""Output of the harness, in the run's folder of logs."""
POLL_SECONDS = 5.0
_ENDED = (State.COMPLETED, State.FAILED, State.PAUSED)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to score checkpoints in."""

    tasks: tuple[str, ...]
    """Names of tasks and groups, and YAML files of tasks."""
    include: Path | None = None
    limit: float | None = None
    shots: int | None = None
    batch_size: int = 8
    tokenizer: Path | None = None
    """Folder of the tokenizer; None: the one of the run's data."""
    device: str = "auto"


def check_harness() -> None:
    """Refuse to go on without the harness.

    Raises:
        UserError: it is not installed.
    """
    for package in ("lm_eval", "transformers", "accelerate"):
        if find_spec(package) is None:
            raise UserError(f"evaluate needs the package {package}: pip install 'asyncpp[eval]'")


def device_of(run: Run, device: str) -> str:
    """The device for a model of the run: a GPU if there is one, but none that the run trains on."""
    import torch

    if device != "auto":
        return device
    status = run.status()
    beside = status.state == State.RUNNING and status.host == socket.gethostname()
    in_job = "SLURM_JOB_ID" in os.environ
    return "cuda" if torch.cuda.is_available() and (in_job or not beside) else "cpu"


def evaluate_run(run: Run, asked: Asked, *, every_checkpoint: bool, follow: bool) -> Iterator[Score]:
    """Score the newest checkpoint, or every one, and yield what was added; what has these scores already is
    left out.

    Args:
        run: the run.
        asked: the tasks.
        every_checkpoint: score all that the run still keeps, the oldest first.
        follow: go on with those that appear, until the run has ended.

    Raises:
        UserError: a task, the harness or a checkpoint is missing.
    """
    check_harness()
    tried: set[int] = set()
    while True:
        # Asked first: a checkpoint that the run wrote before its end is then seen below.
        ended = not follow or run.status().state in _ENDED
        steps = sorted(saved_steps(run.checkpoints))
        if not steps and ended:
            raise UserError(f"{run.folder} has no checkpoint yet: there are no weights to score")
        due = [step for step in (steps if every_checkpoint else steps[-1:]) if step not in tried]
        if due:
            tried.add(due[0])
            yield from _score_checkpoint(run, asked, due[0])
        elif ended:
            return
        else:
            time.sleep(POLL_SECONDS)


def _score_checkpoint(run: Run, asked: Asked, step: int) -> list[Score]:
    manifest = folder_of(run.checkpoints, step) / MANIFEST
    try:
        checkpoint = hashlib.sha256(manifest.read_bytes()).hexdigest()
    except OSError:
        say(f"step {step}: its checkpoint was replaced by a newer one before it was read")
        return []
    owner = owners_of(run)[0]
    known, _ = scores_of(run, owner)
    settings = (step, checkpoint, asked.limit, asked.shots)
    done = {
        each.asked
        for each in known
        if (each.step, each.checkpoint_sha256, each.limit, each.shots) == settings
    }
    tasks = [task for task in asked.tasks if task not in done]
    if not tasks:
        say(f"step {step}: scored already ({FILE})")
        return []
    with tempfile.TemporaryDirectory(prefix="asyncpp-evaluate-") as folder:
        model = Path(folder) / "model"
        model.mkdir()
        try:
            export_run(run, model, step=step)
        except UserError:
            if step in saved_steps(run.checkpoints):
                raise
            say(f"step {step}: its checkpoint was replaced by a newer one while it was read")
            return []
        if asked.tokenizer is None and not (model / "tokenizer.json").exists():
            raise UserError("the run's data does not say which tokenizer made it; name it: --tokenizer DIR")
        say(f"step {step}: scoring {', '.join(tasks)}")
        answer = _answer(run, asked, tasks, model)
    scores = [
        Score(
            time=time.time(),
            owner=owner,
            step=step,
            checkpoint_sha256=checkpoint,
            limit=asked.limit,
            shots=asked.shots,
            harness=answer.harness,
            asked=each.asked,
            task=each.task,
            metrics=each.metrics,
            errors=each.errors,
            samples=each.samples,
            content_sha256=each.content_sha256,
        )
        for each in answer.scores
    ]
    add_scores(run, scores)
    return scores


def _answer(run: Run, asked: Asked, tasks: list[str], model: Path) -> Answer:
    """What the harness answers.

    Raises:
        UserError: a task is not known or cannot be had; or the harness failed.
    """
    request, answer = model.with_name("request.json"), model.with_name("answer.json")
    request.write_bytes(
        encoded(
            Request(
                model=str(model),
                tokenizer=None if asked.tokenizer is None else str(asked.tokenizer),
                tasks=tasks,
                include=None if asked.include is None else str(asked.include),
                device=device_of(run, asked.device),
                batch_size=asked.batch_size,
                limit=asked.limit,
                shots=asked.shots,
            )
        )
    )
    threads = str(run.config().site.threads)
    environment = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", **os.environ}
    run.logs.mkdir(exist_ok=True)
    with (run.logs / LOG).open("ab") as log:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "asyncpp_cli.scoring.harness", str(request), str(answer)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            check=False,
        )
    if not answer.is_file():
        last = (run.logs / LOG).read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        raise UserError(
            f"the harness ended with exit code {ended.returncode}: {last:.200} ({run.logs / LOG})"
        )
    found = read_record(answer, Answer)
    if found.problem:
        raise UserError(found.problem)
    return found
