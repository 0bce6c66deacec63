"""`asyncpp data`: text into token shards, and a look at them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Turn text into token shards that training reads.")


@app.command("prepare")
def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Text, JSON lines (.jsonl) or Parquet: files, folders, patterns; .gz .xz .bz2 .zst, too.",
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer",
            metavar="bytes|FILE|DIR|train:SIZE",
            help="Bytes; a Hugging Face tokenizer.json; a folder with GPT-2's BPE files; or a BPE of SIZE "
            "tokens, trained on the data.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder of the shards: new, or one that was begun.")
    ],
    field: Annotated[
        str, typer.Option("--field", metavar="NAME", help="Holds the text in JSON lines and Parquet.")
    ] = "text",
    separator: Annotated[
        str,
        typer.Option(
            "--separator", metavar="LINE", help="Line that ends a document in text; '' is an empty one."
        ),
    ] = "<|endoftext|>",
    validation_share: Annotated[
        float, typer.Option("--validation-share", metavar="SHARE", help="Of the documents, held out.")
    ] = 0.005,
    end_of_document: Annotated[
        str | None,
        typer.Option(
            "--end-of-document", metavar="TOKEN", help="The tokenizer's token for it, if not a usual one."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", help="Processes; as many as cores if not given.")
    ] = None,
) -> None:
    """Turn text into a folder of token shards with a manifest: `data.path` of a template.

    Can be interrupted and typed again: finished shards stay. The result does not depend on --workers.
    """
    from asyncpp_cli.cluster.resources import this_machine
    from asyncpp_cli.console import say
    from asyncpp_cli.data.prepare import Order
    from asyncpp_cli.data.prepare import prepare as carry_out
    from asyncpp_cli.data.progress import shown_progress
    from asyncpp_cli.data.sources import find_sources
    from stages.shards import count

    if not 0 < validation_share < 1:
        raise UserError(f"--validation-share is {validation_share:g}, must be a share between 0 and 1")
    if workers is not None and workers < 1:
        raise UserError(f"--workers is {workers}, must be at least 1")
    if "\n" in separator:
        raise UserError("--separator is one line")
    order = Order(
        sources=find_sources(inputs),
        tokenizer=tokenizer,
        end=end_of_document,
        field=field,
        separator=separator,
        validation_share=validation_share,
        out=out,
        workers=workers or this_machine().cores,
    )
    try:
        with shown_progress() as progress:
            prepared, written = carry_out(order, progress)
    except KeyboardInterrupt:
        say(f"interrupted; what is finished stays in {out}, and the same command goes on")
        raise typer.Exit(130) from None
    if not written:
        say(f"{out} is complete already")
    tokens = {split: count(shards) for split, shards in prepared.splits.items()}
    print(
        f"{out}: {tokens['train']:,} tokens to train on, {tokens['validation']:,} held out; "
        f"{prepared.bytes_per_token:.2f} bytes a token, model.vocab_size: {prepared.vocab_size} or more"
    )


@app.command("inspect")
def inspect(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A prepared folder, or token shards of another project.")
    ],
    samples: Annotated[int, typer.Option("--samples", metavar="N", help="Of each split.")] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Of where samples are taken.")] = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", metavar="bytes|FILE|DIR", help="To decode with; a prepared folder has its own."
        ),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Hold every file against its checksum.")] = False,
) -> None:
    """Show what is in token shards: counts, and samples of the text."""
    from asyncpp_cli.data.show import inspect as show

    if samples < 0:
        raise UserError(f"--samples is {samples}, must be 0 or more")
    show(folder, samples=samples, seed=seed, tokenizer=tokenizer, verify=verify)


@app.command("moved")
def moved(
    experiment: Annotated[
        Path, typer.Argument(metavar="EXPERIMENT", help="Folder that `asyncpp sweep` wrote.")
    ],
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Where its data lies now: what `data.path` would be.")
    ],
) -> None:
    """Say where an experiment's data has moved to. Its runs stay the same; other data is refused.

    Runs that have not begun and runs that go on look there from now on.
    """
    from asyncpp_cli.console import say
    from asyncpp_cli.errors import DamagedError
    from asyncpp_cli.run_data import find_moved
    from asyncpp_cli.runs import open_experiment

    try:
        count = find_moved(open_experiment(experiment), path)
    except DamagedError as error:
        raise UserError(str(error)) from error
    say(f"{count} runs of {experiment} find their data in {path} now.")
