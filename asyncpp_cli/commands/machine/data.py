"""`asyncpp data`: prepares, inspects and relocates training data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.base.console import finite, tell
from asyncpp_cli.base.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Turn text into token shards that training reads.")


@app.command("prepare")
def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT",
            help="Text, JSON lines (.jsonl) or Parquet, also as .gz .xz .bz2 .zst: files, folders, patterns.",
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="bytes|FILE|DIR",
            help="Bytes; or a Hugging Face tokenizer.json, or a folder with one.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the shards: new, or empty.")],
    field: Annotated[
        str, typer.Option(metavar="NAME", help="Field with the text in JSON lines and Parquet.")
    ] = "text",
    separator: Annotated[
        str, typer.Option(metavar="LINE", help="Line that ends a document in text files; '': an empty line.")
    ] = "<|endoftext|>",
    validation_share: Annotated[
        float, typer.Option(parser=finite, metavar="SHARE", help="Share of documents to hold out.")
    ] = 0.005,
    end_of_document: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="End-of-document token, if not a usual one.")
    ] = None,
    start_of_document: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="Token to begin each document with, such as <s>."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=4096, help="Processes; default: one per core.")
    ] = None,
) -> None:
    """Turn text into a folder of token shards with a manifest: `data.path` of a template.

    The result does not depend on --workers.
    """
    from asyncpp_cli.base.atomic_files import real_folder
    from asyncpp_cli.base.console import say
    from asyncpp_cli.data.prepare import PrepareOrder, prepare_data
    from asyncpp_cli.data.sources import find_sources
    from asyncpp_cli.sites.resources import this_machine
    from stages.data.prepared import few_documents
    from stages.data.shards import count

    if not 0 < validation_share < 1:
        raise UserError(f"--validation-share is {validation_share:g}, must be a share between 0 and 1")
    if set("\r\n") & set(separator):
        raise UserError("--separator must be one line")
    order = PrepareOrder(
        sources=find_sources(inputs),
        tokenizer=tokenizer,
        end=end_of_document,
        start=start_of_document,
        field=field,
        separator=separator,
        validation_share=validation_share,
        out=real_folder(out),
        workers=workers or this_machine().cores,
    )
    prepared = prepare_data(order)
    if warning := few_documents(prepared):
        say(f"note: {warning}")
    tokens = {split: count(shards) for split, shards in prepared.splits.items()}
    tell(
        f"{out}: {tokens['train']:,} tokens for training, {tokens['validation']:,} held out; "
        f"{prepared.bytes_per_token:.2f} bytes per token, model.vocab_size: {prepared.vocab_size} or more"
    )


@app.command("inspect")
def inspect(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A prepared folder, or token shards of another project.")
    ],
    samples: Annotated[int, typer.Option(metavar="N", min=0, max=10_000, help="Samples of each split.")] = 3,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed for the positions of the samples.")] = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="bytes|FILE|DIR", help="To decode with; default: the prepared folder's own."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="Type of tokens in .bin files without a header: data.dtype.")
    ] = "auto",
    verify: Annotated[bool, typer.Option("--verify", help="Check the checksum of every file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print counts and samples as JSON.")] = False,
) -> None:
    """Show counts of token shards and samples of their text."""
    from asyncpp_cli.data.inspect import show_shards
    from stages.config.run_config import RAW_DTYPES

    if dtype not in ("auto", *RAW_DTYPES):
        raise UserError(f"--dtype is {dtype}; accepted: auto, {', '.join(RAW_DTYPES)}")
    show_shards(
        folder,
        samples=samples,
        seed=seed,
        tokenizer=tokenizer,
        dtype=dtype,
        verify=verify,
        as_json=as_json,
    )


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
