"""`asyncpp evaluate`: scores of a run's checkpoints in tasks of lm-evaluation-harness."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.commands.arguments import OneRun


def evaluate(
    run_folder: OneRun,
    tasks: Annotated[
        str,
        typer.Option(
            metavar="TASK,..", help="Tasks or groups of lm_eval, of --include, or YAML files of tasks."
        ),
    ],
    every_checkpoint: Annotated[
        bool, typer.Option("--every-checkpoint", help="All checkpoints that there are, not the newest alone.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with further checkpoints until the run has ended.")
    ] = False,
    include: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with tasks of your own, as YAML files.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most samples of a task; default: all.")
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Examples in a prompt; default: the task's number."),
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Texts in a batch.")] = 8,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Tokenizer, if the run's data does not have it.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto: a GPU unless the run trains on this machine.")
    ] = "auto",
    site: Annotated[
        str | None, typer.Option(metavar="SITE", help="Score in a job of this cluster instead of here.")
    ] = None,
) -> None:
    """Score a run's checkpoints in tasks of lm-evaluation-harness.

    The newest checkpoint, or each, is exported and scored by a process of the harness; the run may train
    meanwhile. Scores are added to the run's scores.jsonl, and shown by `report`. What is there already is not
    scored again.

    With --site a job follows the run: it scores each checkpoint that appears, until the run has ended.
    """
    from asyncpp_cli.base.console import tell
    from asyncpp_cli.base.errors import UserError
    from asyncpp_cli.runs.experiment_folder import run_at
    from asyncpp_cli.scoring.evaluation import Asked, evaluate_run

    names = tuple(dict.fromkeys(name.strip() for name in tasks.split(",") if name.strip()))
    if not names:
        raise UserError("--tasks names no task; accepted: names of tasks, separated by commas")
    for name in names:
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            raise UserError(
                f"--tasks: {name} does not exist; accepted: a YAML file of a task, or a task's name"
            )
    for option, folder in (("--include", include), ("--tokenizer", tokenizer)):
        if folder is not None and not folder.is_dir():
            raise UserError(f"{option} {folder}: accepted: a folder")
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {device}: accepted: auto, cpu, cuda")
    asked = Asked(
        tasks=tuple(str(Path(name).absolute()) if Path(name).is_file() else name for name in names),
        include=None if include is None else include.absolute(),
        limit=limit,
        shots=shots,
        batch_size=batch_size,
        tokenizer=None if tokenizer is None else tokenizer.absolute(),
        device=device,
    )
    run = run_at(run_folder)
    if site is not None:
        from asyncpp_cli.scoring.job import submit_evaluation

        submit_evaluation(run, asked, site=site)
        return
    for score in evaluate_run(run, asked, every_checkpoint=every_checkpoint or follow, follow=follow):
        for metric, value in score.metrics.items():
            error = f" ± {score.errors[metric]:.4f}" if metric in score.errors else ""
            tell(f"step {score.step}: {score.task} {metric} {value:.4f}{error} ({score.samples:,} samples)")
