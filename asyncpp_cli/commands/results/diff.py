"""`asyncpp diff`: what differs between two runs, cells or experiments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from asyncpp_cli.base.console import as_plain, say, tell
from asyncpp_cli.commands.arguments import run_words

_MOST_VALUES = 6


def diff(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            help="An experiment DIR, or DIR/RUN: all its runs whose ids begin so.",
            autocompletion=run_words,
        ),
    ],
    second: Annotated[
        Path,
        typer.Argument(metavar="B", help="What to compare it with, likewise.", autocompletion=run_words),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Show what differs between two runs, cells or experiments.

    Settings, versions of asyncpp (with its commit), torch and Python, machine, data, and each cell's losses,
    with their difference over the seeds that both have. `report A B` has all numbers of both; `report DIR
    --against ARM` compares any two arms.
    """
    from asyncpp_cli.base.errors import need_polars

    need_polars()
    from asyncpp_cli.report.analysis.difference import difference
    from asyncpp_cli.report.load.experiments import load_selection
    from asyncpp_cli.runs.status import UNKNOWN

    a, b = load_selection(first), load_selection(second)
    compared = difference(a, b)
    for run in (*a, *b):
        if run.state in UNKNOWN:
            say(f"{run.id} is {run.state} and left out of the means: {run.reason}", one_line=True)
    if as_json:
        sides = {
            side: {"name": str(path), "runs": [run.id for run in runs]}
            for side, path, runs in (("a", first, a), ("b", second, b))
        }
        print(json.dumps(as_plain(sides | compared), indent=1, default=str))
        return
    tell(f"A: {first} (runs: {len(a)})\nB: {second} (runs: {len(b)})\n")
    _show(compared["settings"], title="Settings that differ")
    _show(compared["conditions"], title="Versions, machine and data that differ")
    losses = {row["cell"]: row for row in compared["losses"]}
    shown = {
        cell: {side: [] if row[side] is None else [f"{row[side]:.4f}"] for side in ("a", "b")}
        | {"change": row["text"]}
        for cell, row in losses.items()
    }
    _show(
        shown, title="Validation loss, mean over completed runs", further={"B - A (95% interval)": "change"}
    )


def _show(
    values: Mapping[str, Mapping[str, Any]], *, title: str, further: Mapping[str, str] | None = None
) -> None:
    """A table of both sides' values by key."""
    from asyncpp_cli.base.console import show_table
    from asyncpp_cli.base.tables import Fit

    further = further or {}
    if not values:
        tell(f"{title}: none.\n")
        return
    rows = [
        [key, _listed(of["a"]), _listed(of["b"]), *(str(of[name]) for name in further.values())]
        for key, of in values.items()
    ]
    show_table(["", "A", "B", *further], rows, title=title, fit=Fit(fold=["A", "B"]))
    print()


def _listed(values: Sequence[Any]) -> str:
    texts = [value if isinstance(value, str) else json.dumps(value, default=str) for value in values]
    more = f", {len(texts) - _MOST_VALUES} more" if len(texts) > _MOST_VALUES else ""
    return ", ".join(texts[:_MOST_VALUES]) + more or "?"
