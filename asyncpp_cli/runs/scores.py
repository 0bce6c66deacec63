"""Scores of a run's checkpoints in tasks of lm-evaluation-harness.

EXPERIMENT/runs/ID/scores.jsonl   append-only: the scores of one checkpoint in one task per line
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncpp_cli.base.atomic_files import append_line
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import Time
from stages.checkpoint.files import Owner
from stages.config.records import Count, DamagedError, Record, decoded, encoded

FILE = "scores.jsonl"


class Score(Record, frozen=True, kw_only=True):
    """What a checkpoint scored in a task."""

    format: Count = 1
    time: Time
    owner: Owner
    """The run, and the hash of its configuration."""
    step: Count
    checkpoint_sha256: str
    """Of the checkpoint's manifest, which has the hashes of its files."""
    asked: str
    """What `--tasks` named: the task, a group of tasks, or a file."""
    task: str
    metrics: dict[str, float]
    errors: dict[str, float]
    """Standard errors, of the metrics that have one."""
    samples: Count
    limit: float | None = None
    """Most samples of a task, if less than all were asked for."""
    shots: Count | None = None
    """Examples in a prompt; None: the task's own number."""
    content_sha256: str
    """Of the questions and answers, as the harness hashes them; empty for a group of tasks."""
    harness: str
    """Version of lm_eval."""

    @property
    def metric(self) -> str:
        """The metric that tables show: `acc_norm`, if the task has it, or its first."""
        return "acc_norm" if "acc_norm" in self.metrics else next(iter(self.metrics))


def add_scores(run: Run, scores: Sequence[Score]) -> None:
    """Append scores to a run's file."""
    for score in scores:
        append_line(run.folder / FILE, encoded(score).decode().rstrip())


def scores_of(run: Run, owner: Owner) -> tuple[list[Score], list[str]]:
    """The scores of a run by step, the latest of each task and step; and what is wrong with other lines.

    Args:
        run: the run.
        owner: the run as its checkpoints name it.
    """
    file = run.folder / FILE
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{file} cannot be read ({error.strerror})"]
    latest: dict[tuple[int, str], Score] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            score = decoded(line, Score, where=f"{file}, line {number}")
        except DamagedError as error:
            problems.append(f"{error}; this line is left out")
            continue
        if score.owner != owner:
            problems.append(f"{file}, line {number} has scores of {score.owner}; this line is left out")
        elif score.metrics:
            latest[score.step, score.task] = score
    return [latest[key] for key in sorted(latest)], problems
