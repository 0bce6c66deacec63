"""The options of `asyncpp data`; each field is one of the command line. Imports nothing that takes long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.base.console import finite


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The options of `asyncpp data prepare`."""

    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="bytes|FILE|DIR",
            help="Bytes; or a Hugging Face tokenizer.json, or a folder with one.",
        ),
    ]
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the shards: new, or empty.")]
    field: Annotated[
        str, typer.Option(metavar="NAME", help="Field with the text in JSON lines and Parquet.")
    ] = "text"
    separator: Annotated[
        str, typer.Option(metavar="LINE", help="Line that ends a document in text files; '': an empty line.")
    ] = "<|endoftext|>"
    validation_share: Annotated[
        float, typer.Option(parser=finite, metavar="SHARE", help="Share of documents to hold out.")
    ] = 0.005
    end_of_document: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="End-of-document token, if not a usual one.")
    ] = None
    start_of_document: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="Token to begin each document with, such as <s>."),
    ] = None
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=4096, help="Processes; default: one per core.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """The options of `asyncpp data inspect`."""

    samples: Annotated[int, typer.Option(metavar="N", min=0, max=10_000, help="Samples of each split.")] = 3
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed for the positions of the samples.")] = 0
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="bytes|FILE|DIR", help="To decode with; default: the prepared folder's own."),
    ] = None
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="Type of tokens in .bin files without a header: data.dtype.")
    ] = "auto"
    verify: Annotated[bool, typer.Option("--verify", help="Check the checksum of every file.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print counts and samples as JSON.")] = False
