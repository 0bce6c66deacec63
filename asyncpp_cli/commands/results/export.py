"""`asyncpp export`: writes a run's weights as safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.completion import run_folders
from asyncpp_cli.errors import UserError
from stages.checkpoint.export_options import ExportFormat, Weights
from stages.torch_process import importing_torch

if TYPE_CHECKING:
    from stages.config import RunConfig


def export(
    run_folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR", help="Folder of the run, EXPERIMENT/runs/ID.", autocompletion=run_folders
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write: new, or empty.")],
    format: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="hf: weights and config.json for transformers; safetensors: weights only, own names.",
        ),
    ] = ExportFormat.HF,
    which: Annotated[
        Weights,
        typer.Option("--weights", help="master: used for evaluation; working: used by the pipeline."),
    ] = Weights.MASTER,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Checkpoint of step N instead of the newest.")
    ] = None,
) -> None:
    """Write a run's weights as safetensors.

    The number of its stages does not matter.

    Another run can start from the folder (`model.init`); with --format hf, Hugging Face transformers loads it
    with AutoModelForCausalLM.from_pretrained.
    """
    from asyncpp_cli.atomic_files import new_folder, usual_mask
    from asyncpp_cli.errors import DamagedError
    from asyncpp_cli.experiment.run_data import config_to_train
    from asyncpp_cli.runs.run_folder import open_run
    from stages.checkpoint.files import CheckpointError

    run = open_run(run_folder)
    try:
        config = config_to_train(run)
        if run.saved_step is None:
            raise UserError(f"{run_folder} has no checkpoint yet: there are no weights to export")
        with new_folder(out) as folder:
            with importing_torch():
                from stages.checkpoint.export import write_weights
                from stages.checkpoint.saved_weights import SavedWeights, newest_checkpoint

            saved = SavedWeights(newest_checkpoint(run.checkpoints, step=step), config)
            end = _write_tokenizer(config, folder) if format is ExportFormat.HF else None
            count = write_weights(saved, config, folder, format=format, weights=which, end_of_document=end)
            # safetensors makes files that only their owner can read.
            for file in folder.iterdir():
                file.chmod(0o666 & ~usual_mask())
    except (DamagedError, CheckpointError) as error:
        raise UserError(str(error)) from error
    print(f"{out}: {which} weights of {run.id} after step {saved.step}, {count:,} parameters")


def _write_tokenizer(config: RunConfig, folder: Path) -> int | None:
    """Copy the tokenizer of prepared data beside the weights; returns the end-of-document token.

    None if the data is not a prepared folder or not available.
    """
    import json
    import shutil

    from asyncpp_cli.console import say
    from stages.data.prepared import MANIFEST, read_prepared
    from stages.data.shards import DataError

    if config.data.path is None or not (Path(config.data.path) / MANIFEST).is_file():
        return None
    try:
        prepared = read_prepared(Path(config.data.path))
    except DataError as error:
        say(f"The tokenizer is left out: {error}")
        return None
    if prepared.tokenizer_file is not None:
        shutil.copyfile(prepared.tokenizer_file, folder / "tokenizer.json")
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.data.context,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    return prepared.end_of_document
