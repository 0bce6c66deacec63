"""`asyncpp export`: a run's weights, to be used elsewhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.errors import UserError


class Format(StrEnum):
    """What is written; `stages.export.Layout`, which is only imported with torch."""

    HF = "hf"
    SAFETENSORS = "safetensors"


class Which(StrEnum):
    """Which weights; `stages.saved_weights.Weights`, likewise."""

    MASTER = "master"
    WORKING = "working"


def export(
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder of the run, EXPERIMENT/runs/ID.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write: new, or empty.")],
    layout: Annotated[
        Format,
        typer.Option(
            "--format",
            help="hf: a Llama with its config.json, for transformers; safetensors: weights alone, our names.",
        ),
    ] = Format.HF,
    which: Annotated[
        Which,
        typer.Option(
            "--weights", help="master: what is evaluated; working: what the pipeline computes with."
        ),
    ] = Which.MASTER,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Checkpoint of step N instead of the newest.")
    ] = None,
) -> None:
    """Write a run's weights as safetensors, whatever the number of its stages.

    The folder is what `model.init` of another run starts from, and with --format hf what
    AutoModelForCausalLM.from_pretrained of Hugging Face transformers loads.
    """
    from asyncpp_cli.errors import DamagedError
    from asyncpp_cli.files import new_folder
    from asyncpp_cli.runs import open_run
    from stages.checkpoint_files import CheckpointError

    run = open_run(run_folder)
    try:
        config = run.config()
        if run.saved_step is None:
            raise UserError(f"{run_folder} has no checkpoint yet: there are no weights to export")
        with new_folder(out) as folder:
            from stages.export import Layout, write_weights
            from stages.saved_weights import SavedWeights, Weights, newest_checkpoint

            saved = SavedWeights(newest_checkpoint(run.checkpoints, step=step), config)
            count = write_weights(saved, config, folder, layout=Layout(layout), weights=Weights(which))
    except (DamagedError, CheckpointError) as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{out} could not be written: {error}") from error
    print(f"{out}: {which} weights of {run.id} after step {saved.step}, {count:,} parameters")
