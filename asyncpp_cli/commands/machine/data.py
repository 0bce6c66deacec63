"""`asyncpp data`: prepares, inspects and relocates training data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.base.console import tell
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.commands.arguments import with_options
from asyncpp_cli.data.options import InspectOptions, PrepareOptions

app = typer.Typer(no_args_is_help=True, help="Turn text into token shards that training reads.")


@app.command("prepare")
@with_options
def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            help="Text, JSON lines (.jsonl) or Parquet, also as .gz .xz .bz2 .zst: files, folders, patterns.",
        ),
    ],
    options: PrepareOptions,
) -> None:
    """Turn text into a folder of token shards with a manifest: `data.path` of a template.

    The result does not depend on --workers.
    """
    from asyncpp_cli.base.console import say
    from asyncpp_cli.data.prepare import PrepareOrder, prepare_data
    from asyncpp_cli.data.sources import find_sources
    from asyncpp_cli.sites.resources import this_machine
    from stages.data.prepared import few_documents
    from stages.data.shards import count

    if not 0 < options.validation_share < 1:
        share = f"--validation-share is {options.validation_share:g}"
        raise UserError(f"{share}, must be a share between 0 and 1")
    if set("\r\n") & set(options.separator):
        raise UserError("--separator must be one line")
    options = replace(options, workers=options.workers or this_machine().cores)
    order = PrepareOrder(sources=find_sources(inputs), **vars(options))
    prepared = prepare_data(order)
    if warning := few_documents(prepared):
        say(f"note: {warning}")
    tokens = {split: count(shards) for split, shards in prepared.splits.items()}
    tell(
        f"{options.out}: {tokens['train']:,} tokens for training, {tokens['validation']:,} held out; "
        f"{prepared.bytes_per_token:.2f} bytes per token, model.vocab_size: {prepared.vocab_size} or more"
    )


@app.command("inspect")
@with_options
def inspect(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A prepared folder, or token shards of another project.")
    ],
    options: InspectOptions,
) -> None:
    """Show counts of token shards and samples of their text."""
    from asyncpp_cli.data.inspect import show_shards
    from stages.config.run_config import RAW_DTYPES

    if options.dtype not in ("auto", *RAW_DTYPES):
        raise UserError(f"--dtype is {options.dtype}; accepted: auto, {', '.join(RAW_DTYPES)}")
    show_shards(folder, options)


@app.command("moved")
def moved(
    experiment: Annotated[
        Path, typer.Argument(metavar="EXPERIMENT", help="Folder that `asyncpp sweep` wrote.")
    ],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="New path of its data, as for `data.path`.")],
) -> None:
    """Set the new path of an experiment's data. Runs keep their ids; other data is refused.

    Runs that start or resume from now on read the data there.
    """
    from asyncpp_cli.base.console import say
    from asyncpp_cli.experiment.run_data import move_data
    from asyncpp_cli.runs.experiment_folder import open_experiment

    count = move_data(open_experiment(experiment), path)
    say(f"{count} runs of {experiment} now read their data from {path}.")
