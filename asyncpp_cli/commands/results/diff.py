"""`asyncpp diff`: what differs between two runs, cells or experiments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncpp_cli.base.console import say, tell
from asyncpp_cli.completion import run_folders

if TYPE_CHECKING:
    from asyncpp_cli.report.analysis.difference import CellPair, Difference, NumberPair, Values

_FORMS = {
    "val_loss": "{:.4f}",
    "bits_per_byte": "{:.4f}",
    "tokens_per_second": "{:,.0f}",
    "seconds": "{:,.1f}",
    "delay": "{:g}",
    "bubble": "{:.1%}",
    "peak_memory": "{:,.0f}",
}
_WITH_SIGN = {name: form.replace("{:", "{:+") for name, form in _FORMS.items()}
_OF_CELLS = ("val_loss", "tokens_per_second")
"""Numbers shown where there are several cells; JSON has all."""
_MOST_VALUES = 6
_MOST_IDS = 5


def diff(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            help="An experiment DIR, or DIR/RUN: all its runs whose ids begin so.",
            autocompletion=run_folders,
        ),
    ],
    second: Annotated[
        Path,
        typer.Argument(metavar="B", help="What to compare it with, likewise.", autocompletion=run_folders),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Show what differs between two runs, cells or experiments.

    Settings, versions of asyncpp (with its commit), torch and Python, machine, data, and the numbers of each
    cell that both have, as means over completed seeds.
    """
    from asyncpp_cli.base.threads import need_polars

    need_polars()
    from asyncpp_cli.report.analysis.difference import difference
    from asyncpp_cli.report.load.experiments import load_selection

    a, b = load_selection(first), load_selection(second)
    compared = difference(a.runs, b.runs)
    for run in (*a.runs, *b.runs):
        if run.state == "damaged":
            say(f"{run.id} is damaged and left out of the means: {run.reason}", one_line=True)
    if as_json:
        sides = {
            side: {"name": selection.name, "runs": [run.id for run in selection.runs]}
            for side, selection in (("a", a), ("b", b))
        }
        print(json.dumps(sides | compared.record(), indent=1, default=str))
        return
    tell(f"A: {a.name} ({_count(len(a.runs), 'run')})\nB: {b.name} ({_count(len(b.runs), 'run')})\n")
    _show(compared)


def _show(compared: Difference) -> None:
    site = {key: values for key, values in compared.settings.items() if key.startswith("site.")}
    own = {key: values for key, values in compared.settings.items() if key not in site}
    _show_values(own, name="settings")
    if site:
        _show_values(site, name="settings of the site, which are not part of an id")
    _show_values(compared.conditions, name="versions, machine and data")
    if len(compared.cells) == 1:
        _show_numbers(compared.cells[0])
    elif compared.cells:
        _show_cells(compared.cells)
    for side, ids in (("A", compared.only_a), ("B", compared.only_b)):
        if ids:
            more = f" and {len(ids) - _MOST_IDS} more" if len(ids) > _MOST_IDS else ""
            tell(f"Only in {side}: {', '.join(ids[:_MOST_IDS])}{more}")


def _show_values(values: Mapping[str, Values], *, name: str) -> None:
    from asyncpp_cli.base.console import show_table
    from asyncpp_cli.base.tables import Fit

    if not values:
        print(f"The same {name}.\n")
        return
    rows = [[key, _listed(a), _listed(b)] for key, (a, b) in values.items()]
    show_table(["key", "A", "B"], rows, title=f"Different {name}", fit=Fit(fold=["A", "B"]))
    print()


def _show_numbers(pair: CellPair) -> None:
    from asyncpp_cli.base.console import show_table

    rows = [
        [name, *_texts(name, number)]
        for name, number in pair.numbers.items()
        if number.a is not None or number.b is not None
    ]
    done_a, done_b = pair.runs
    title = f"Numbers: mean of {_count(done_a, 'completed run')} of A, {done_b} of B"
    if rows:
        show_table(["", "A", "B", "B - A"], rows, title=title)
    else:
        print(f"{title}: nothing to compare yet.")


def _show_cells(pairs: Sequence[CellPair]) -> None:
    """A row for each cell, with the numbers that tell most."""
    from asyncpp_cli.base.console import show_table

    axes = [axis for axis in pairs[0].axes if len({repr(pair.axes[axis]) for pair in pairs}) > 1]
    columns = [*axes, "runs A", "runs B"]
    for name in _OF_CELLS:
        columns += [f"{name} A", f"{name} B", f"{name} B - A"]
    rows = [
        [
            *(_listed([pair.axes[axis]]) for axis in axes),
            *map(str, pair.runs),
            *(text for name in _OF_CELLS for text in _texts(name, pair.numbers[name])),
        ]
        for pair in pairs
    ]
    show_table(columns, rows, title=f"Means over completed runs of the {len(pairs)} cells that both have")


def _texts(name: str, number: NumberPair) -> list[str]:
    change = "" if number.difference is None else _WITH_SIGN[name].format(number.difference)
    if number.interval is not None:
        change += f" ± {_FORMS[name].format(number.interval.half_width)}"
    return [*("" if value is None else _FORMS[name].format(value) for value in (number.a, number.b)), change]


def _listed(values: Sequence[Any]) -> str:
    texts = [value if isinstance(value, str) else json.dumps(value, default=str) for value in values]
    more = f", {len(texts) - _MOST_VALUES} more" if len(texts) > _MOST_VALUES else ""
    return ", ".join(texts[:_MOST_VALUES]) + more or "?"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
