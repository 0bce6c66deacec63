"""`asyncpp export`: a run's weights, to be used elsewhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.errors import UserError

if TYPE_CHECKING:
    from stages.config import RunConfig


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
    from asyncpp_cli.files import new_folder, usual_mask
    from asyncpp_cli.run_data import config_to_train
    from asyncpp_cli.runs import open_run
    from stages.checkpoint_files import CheckpointError

    run = open_run(run_folder)
    try:
        config = config_to_train(run)
        if run.saved_step is None:
            raise UserError(f"{run_folder} has no checkpoint yet: there are no weights to export")
        with new_folder(out) as folder:
            from stages.export import Layout, write_weights
            from stages.saved_weights import SavedWeights, Weights, newest_checkpoint

            saved = SavedWeights(newest_checkpoint(run.checkpoints, step=step), config)
            end = _write_tokenizer(config, folder) if layout is Format.HF else None
            count = write_weights(
                saved, config, folder, layout=Layout(layout), weights=Weights(which), end_of_document=end
            )
            # safetensors makes files that only their owner reads.
            for file in folder.iterdir():
                file.chmod(0o666 & ~usual_mask())
    except (DamagedError, CheckpointError) as error:
        raise UserError(str(error)) from error
    print(f"{out}: {which} weights of {run.id} after step {saved.step}, {count:,} parameters")


def _write_tokenizer(config: RunConfig, folder: Path) -> int | None:
    """Put the tokenizer of prepared data beside the weights; returns the token that ends a document.

    None where the data is of another kind, or is not here.
    """
    import json
    import shutil

    from asyncpp_cli.console import say
    from stages.prepared import MANIFEST, read_prepared
    from stages.shards import DataError

    if config.data.path is None or not (Path(config.data.path) / MANIFEST).is_file():
        return None
    try:
        prepared = read_prepared(Path(config.data.path))
    except DataError as error:
        say(f"The tokenizer is left out: {error}")
        return None
    if prepared.tokenizer_file is not None:
        shutil.copyfile(prepared.tokenizer_file, folder / "tokenizer.json")
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.data.context}
        (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
    return prepared.end_of_document
