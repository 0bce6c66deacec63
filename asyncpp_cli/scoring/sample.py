"""Text that a run's model goes on with."""

from __future__ import annotations

from pathlib import Path

from asyncpp_cli.base.errors import DamagedError, UserError
from asyncpp_cli.data.tokenizers import Bytes, Library, Tokenizer, read_tokenizer
from asyncpp_cli.experiment.run_data import config_to_train, owners_of
from asyncpp_cli.runs.run_folder import Run
from stages.checkpoint.files import CheckpointError
from stages.config.run_config import DataConfig
from stages.config.torch_process import importing_torch
from stages.data.dataset import is_prepared, tokenizer_folder
from stages.data.foreign_formats import find_shards
from stages.data.prepared import read_prepared
from stages.data.shards import DataError


def sample_run(
    run: Run,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    seed: int,
    step: int | None,
    tokenizer: Path | None,
) -> str:
    """The text that a checkpoint's model adds to a prompt.

    Args:
        run: the run.
        prompt: text to go on from; empty: a new document.
        tokens: most tokens to add; fewer if the document ends.
        temperature: divides the logits; 0: always the likeliest token.
        seed: of the choices.
        step: of the checkpoint; None: the newest.
        tokenizer: folder or file; None: that of the run's data.

    Raises:
        UserError: there is no checkpoint, or the tokenizer is not known.
    """
    try:
        config = config_to_train(run)
        if run.saved_step is None:
            raise UserError(f"{run.folder} has no checkpoint yet: there are no weights to sample from")
        words = _tokenizer(config.data) if tokenizer is None else read_tokenizer(str(tokenizer), end=None)
        with importing_torch():
            from stages.checkpoint.sample import generate, whole_model
            from stages.checkpoint.saved_weights import newest_weights

        saved = newest_weights(run.checkpoints, config, step=step, owners=owners_of(run))
        module, routing = whole_model(saved, config)
    except (CheckpointError, DamagedError, DataError) as error:
        raise UserError(str(error)) from error
    [encoded] = words.encode([prompt.encode()])
    given = encoded.tolist() or [words.end_of_document]
    if max(given) >= config.model.vocab_size:
        raise UserError(
            f"the tokenizer has token {max(given)}, and model.vocab_size is {config.model.vocab_size}"
        )
    added = generate(
        module,
        routing,
        given,
        count=tokens,
        context=config.data.context,
        temperature=temperature,
        seed=seed,
        end=words.end_of_document,
    )
    return words.decode(added)


def _tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer of a run's data.

    Raises:
        DataError: the data cannot be read.
        UserError: it is not known.
    """
    path = tokenizer_folder(data)
    if path is not None and not path.exists():
        raise UserError(f"{path} does not exist, so its tokenizer is not known; name it: --tokenizer PATH")
    if path is not None and is_prepared(path):
        prepared = read_prepared(path)
        if prepared.tokenizer_file is None:
            return Bytes()
        text = prepared.tokenizer_file.read_text(encoding="utf-8")
        words = Library(text, name=prepared.tokenizer, end=None)
        words.end_of_document = prepared.end_of_document
        return words
    if path is not None and find_shards(path):
        raise UserError(f"{path} does not say which tokenizer made it; name it: --tokenizer PATH")
    return Bytes()
