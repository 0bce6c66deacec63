"""`asyncpp export`: writes a run's weights as safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.commands.arguments import OneRun
from stages.checkpoint.export_options import ExportFormat, Weights


def export(
    run_folder: OneRun,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write: new, or empty.")],
    format: Annotated[
        ExportFormat,
        typer.Option(
            help="hf: weights and config.json for transformers; safetensors: weights only, own names."
        ),
    ] = ExportFormat.HF,
    which: Annotated[
        Weights,
        typer.Option(
            "--weights",
            help="master: used for evaluation; ema: their average; working: used by the pipeline.",
        ),
    ] = Weights.MASTER,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Checkpoint of step N instead of the newest.")
    ] = None,
) -> None:
    """Write a run's weights as safetensors.

    The number of its stages does not matter.

    Another run can start from the folder (`model.init`); with --format hf, Hugging Face transformers loads it
    with AutoModelForCausalLM.from_pretrained.
    """
    from asyncpp_cli.base.atomic_files import new_folder
    from asyncpp_cli.base.console import tell
    from asyncpp_cli.commands.results.exported import export_run
    from asyncpp_cli.runs.experiment_folder import run_at

    run = run_at(run_folder)
    with new_folder(out) as folder:
        saved, count = export_run(run, folder, format=format, weights=which, step=step)
    tell(f"{out}: {which} weights of {run.id} after step {saved}, {count:,} parameters")
