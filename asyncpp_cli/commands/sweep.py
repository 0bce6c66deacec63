"""`asyncpp sweep`: a template's cells, checked and written as an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.errors import UserError

if TYPE_CHECKING:
    from asyncpp_cli.matrix import ResolvedCell
    from asyncpp_cli.planner.cells import Expected


def sweep(
    template: Annotated[
        str, typer.Argument(metavar="TEMPLATE", help="A shipped template's name, or a file.")
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Changes, as in train.steps=300 or matrix.seed=[0,1]; each holds for every cell.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder of the experiment: new, or the same one."),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            "--site", metavar="NAME", help="Site profile: refuse cells that its GPUs have no room for."
        ),
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="Check and show the cells; write nothing.")
    ] = False,
) -> None:
    """Render an experiment matrix into a folder of runs, every cell checked before anything is written.

    Into a folder that holds the same experiment, only cells that it lacks are added (more seeds, say), and
    runs whose folder was removed are restored.
    """
    from asyncpp_cli.cluster.sites import find_site
    from asyncpp_cli.console import command, say
    from asyncpp_cli.experiments import render
    from asyncpp_cli.matrix import check, expand
    from asyncpp_cli.planner.cells import device_of, expected
    from asyncpp_cli.sweep_notes import notes
    from asyncpp_cli.template_file import load

    if out is None and not list_only:
        raise UserError("--out DIR is missing: where the experiment goes (or --list, to only show its cells)")
    loaded = load(template, changes or [])
    cells = expand(loaded)
    check(loaded, cells)
    costs = expected(loaded.source, cells, site={} if site is None else device_of(find_site(site)))
    # Written before it is shown: `asyncpp sweep ... | head` must not stop half way.
    rendered = None if list_only or out is None else render(loaded, cells, template_name=template, folder=out)
    show_cells(cells, costs, title=loaded.name)
    for note in notes(cells):
        say(f"note: {note}")
    if rendered is None or out is None:
        return
    if rendered.added == len(cells):
        say(f"Wrote {len(cells)} runs to {out}. Next: {command('launch', out)}")
        return
    held = len(rendered.experiment.cells)
    more = f" ({held - len(cells)} of them not in this template)" if held > len(cells) else ""
    say(f"{out}: {rendered.added} runs added to the {held - rendered.added} that were there{more}.")
    if rendered.restored:
        first, *others = rendered.restored
        named = f"{first} and {len(others)} others" if others else first
        say(f"Restored, since its folder or configuration was gone or damaged: {named}.")


def show_cells(cells: list[ResolvedCell], costs: list[Expected], *, title: str) -> None:
    """The cells as a table on standard output, with their count and what each is expected to take."""
    from asyncpp_cli.console import show_table
    from asyncpp_cli.tables import Narrow, printed

    axes = list(cells[0].cell.axes)
    timed = any(cost.step_seconds is not None for cost in costs)
    rows = []
    for resolved, cost in zip(cells, costs, strict=True):
        row = [resolved.cell.id, *(printed(key, resolved.cell.axes[key]) for key in axes)]
        row.append("" if cost.memory_gb is None else f"{cost.memory_gb:.3g}")
        if timed:
            row.append("" if cost.step_seconds is None else f"{cost.step_seconds:.3g}")
        rows.append(row)
    columns = ["run", *axes, "GB a rank", *(["step s"] if timed else [])]
    # The id has the axes in it.
    narrow = Narrow(optional=["step s", *reversed(axes), "GB a rank"], shared=columns[1:])
    show_table(columns, rows, title=f"{title}: {len(cells)} cells", narrow=narrow)
