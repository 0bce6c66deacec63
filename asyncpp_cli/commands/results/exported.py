"""Writes a run's weights, with the tokenizer of its data, as safetensors."""

from __future__ import annotations

import json
from pathlib import Path

from asyncpp_cli.base.console import say
from asyncpp_cli.base.errors import DamagedError, UserError
from asyncpp_cli.data.exported_tokenizer import encoding_difference, for_transformers
from asyncpp_cli.data.tokenizers import Bytes, byte_tokenizer_json, recorded_text
from asyncpp_cli.experiment.run_data import config_to_train, owners_of
from asyncpp_cli.runs.run_folder import Run
from stages.checkpoint.export_options import ExportFormat, Weights
from stages.checkpoint.files import CheckpointError
from stages.config.run_config import RunConfig
from stages.config.torch_process import importing_torch
from stages.data.dataset import is_prepared, tokenizer_folder
from stages.data.foreign_formats import find_shards
from stages.data.prepared import read_prepared
from stages.data.shards import DataError


def export_run(
    run: Run,
    folder: Path,
    *,
    format: ExportFormat = ExportFormat.HF,
    weights: Weights = Weights.MASTER,
    step: int | None = None,
) -> tuple[int, int]:
    """Write weights into an empty folder; returns the checkpoint's step and the number of values.

    Args:
        run: the run.
        folder: to write into.
        format: of the files.
        weights: those used for evaluation, or those of the pipeline.
        step: of the checkpoint; None: the newest that is whole.

    Raises:
        UserError: there is no such checkpoint, or the format does not have the run's model.
    """
    try:
        config = config_to_train(run)
        if run.saved_step is None:
            raise UserError(f"{run.folder} has no checkpoint yet: there are no weights to export")
        with importing_torch():
            from stages.checkpoint.export import write_weights
            from stages.checkpoint.saved_weights import newest_weights

        saved = newest_weights(run.checkpoints, config, step=step, owners=owners_of(run))
        start, end = _write_tokenizer(config, folder) if format is ExportFormat.HF else (None, None)
        count = write_weights(
            saved,
            config,
            folder,
            format=format,
            weights=weights,
            start_of_document=start,
            end_of_document=end,
        )
    except (DamagedError, CheckpointError) as error:
        raise UserError(str(error)) from error
    # safetensors makes files that only their owner can read.
    for file in folder.iterdir():
        file.chmod(0o666 & folder.stat().st_mode)
    return saved.step, count


def _write_tokenizer(config: RunConfig, folder: Path) -> tuple[int | None, int | None]:
    """Write the data's tokenizer next to the weights; returns the tokens that begin and end a document.

    None where documents have none, as in plain text, or the data is not available. The tokenizer of another
    project's token shards is unknown.

    Raises:
        UserError: transformers would read other tokens out of a text than those that were trained on.
    """
    path = None
    try:
        path = tokenizer_folder(config.data)
        prepared = read_prepared(path) if path is not None and is_prepared(path) else None
        foreign = prepared is None and path is not None and bool(find_shards(path))
        if path is not None and not path.exists():
            raise DataError(f"{path} does not exist")
        if prepared is not None and prepared.tokenizer_file is not None:
            trained = recorded_text(prepared)
        else:
            trained = byte_tokenizer_json()
    except (DataError, OSError, ValueError, UserError) as error:
        say(f"The tokenizer is left out: {error}")
        return None, None
    if foreign:
        say(f"The tokenizer is left out: {path} does not say which one made its tokens")
        return None, None
    start = None if prepared is None else prepared.start_of_document
    end = Bytes.end_of_document if prepared is None else prepared.end_of_document
    content, settings = for_transformers(trained, start=start, end=end)
    settings["model_max_length"] = config.data.context
    if difference := encoding_difference(trained, content, settings):
        raise UserError(
            f"transformers would read other tokens than those that were trained on: {difference}; "
            "accepted: --format safetensors"
        )
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return start, None if prepared is None else end
