"""`asyncpp sweep`: checks a template's cells and writes them as an experiment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.commands.arguments import AllowCode, Changes, template_words

if TYPE_CHECKING:
    from asyncpp_cli.experiment.matrix import ResolvedCell
    from asyncpp_cli.experiment.render import Rendered
    from asyncpp_cli.planner.cells import Expected
    from asyncpp_cli.planner.sweeping import Sweep

_HOURS = {"gpu_hours": "GPU-h", "core_hours": "core-h"}
"""Heading of each kind of hours, by the name of the method that estimates it."""


def sweep(
    template: Annotated[
        str,
        typer.Argument(
            metavar="TEMPLATE", help="Name of a shipped template, or a file.", autocompletion=template_words
        ),
    ],
    changes: Changes = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the experiment: new, or one to extend.")
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Site profile: refuse cells that do not fit its GPUs."),
    ] = None,
    allow_code: AllowCode = None,
    profiles: Annotated[
        list[Path] | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            help="Times measured by `asyncpp plan --measure`, for the expected cost; can be repeated.",
        ),
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="Check and show the cells without writing.")
    ] = False,
    resolve: Annotated[
        bool,
        typer.Option(
            "--resolve",
            help="With --list: print the template as YAML, with its `base` and your changes.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the cells as a JSON list, with what each is expected to cost."),
    ] = False,
) -> None:
    """Render an experiment matrix into a folder of runs.

    Every cell is checked before anything is written.

    In the folder of an existing experiment, only missing cells are added (more seeds, for example), and runs
    whose folder was removed are restored.
    """
    from asyncpp_cli.base.console import say
    from asyncpp_cli.experiment.shipped import find_template
    from asyncpp_cli.experiment.sweep_notes import environment_notes, notes
    from asyncpp_cli.experiment.template import text_of
    from asyncpp_cli.planner.sweeping import sweep_template

    if out is None and not list_only:
        # A name that is none of a template is the first thing to mend.
        find_template("experiments", template, beside=None)
        raise UserError("--out DIR is missing: the experiment's folder (or --list, to only show its cells)")
    if resolve and (not list_only or as_json):
        raise UserError("--resolve goes with --list: it prints the template")
    # Written before the table is printed: `asyncpp sweep ... | head` must not stop it half way.
    swept = sweep_template(
        template,
        changes or [],
        out=None if list_only else out,
        site=site,
        allow_code=allow_code or (),
        profiles=profiles or [],
        plan=(list_only or as_json) and not resolve,
    )
    if as_json:
        _print_cells(swept)
    elif resolve:
        print(text_of(swept.template), end="")
    else:
        show_cells(swept.cells, swept.expected, title=swept.template.name)
    _say_cost(swept)
    for note in [*environment_notes(swept.template), *notes(swept.cells)]:
        say(f"note: {note}")
    if swept.rendered is not None and out is not None:
        _say_written(swept.rendered, swept.cells, out, site=site)


def _print_cells(swept: Sweep) -> None:
    assert swept.expected is not None
    each_cell = zip(swept.cells, swept.expected, strict=True)
    print(json.dumps([_record(*each) for each in each_cell], indent=1))


def _say_written(rendered: Rendered, cells: Sequence[ResolvedCell], out: Path, *, site: str | None) -> None:
    """Say which runs a sweep has added to its folder or restored there, and what to do next."""
    from asyncpp_cli.base.console import command, say

    launch = command("launch", out, *(["--site", site] if site else []))
    if rendered.added == len(cells):
        say(f"Wrote {len(cells)} run{'s' * (len(cells) != 1)} to {out}. Next: {launch}")
        if any(cell.config.site.device == "cuda" or cell.config.site.gpu for cell in cells):
            say(f"What a GPU would refuse shows without one: {command('rehearse', out)}")
        return
    total = len(rendered.experiment.cells)
    others = f" ({total - len(cells)} of them not in this template)" if total > len(cells) else ""
    say(f"{out}: {rendered.added} runs added to the {total - rendered.added} that were there{others}.")
    for line in rendered.why_new:
        say(f"{line}.")
    if rendered.restored:
        first, *further = rendered.restored
        restored = f"{first} and {len(further)} others" if further else first
        say(f"Restored, since its folder or configuration was gone or damaged: {restored}.")
    if rendered.added or rendered.restored:
        say(f"Next: {launch}")


def _record(resolved: ResolvedCell, cost: Expected) -> dict[str, Any]:
    """A cell for programs; null where an estimate is not known."""
    hours = {name: _hours([resolved], [cost], name)[0] for name in _HOURS}
    estimates = {"memory_gb": cost.memory_gb, "step_seconds": cost.step_seconds, **hours}
    cell = resolved.cell
    return {"id": cell.id, "axes": cell.axes, "loss_of": cell.loss_of, **estimates}


def _say_cost(swept: Sweep) -> None:
    """Say what all cells are expected to cost, where that is known."""
    from asyncpp_cli.base.console import say
    from asyncpp_cli.runs.attempts.cost import amount

    if swept.expected is None:
        return
    for name, unit in _HOURS.items():
        hours = _hours(swept.cells, swept.expected, name)
        known = [each for each in hours if each is not None]
        if known:
            of_cells = f" ({len(known)} of {len(hours)} cells)" if len(known) < len(hours) else ""
            say(f"Expected cost of training: {amount(sum(known))} {unit}ours in all{of_cells}.")


def _hours(cells: Sequence[ResolvedCell], costs: Sequence[Expected], name: str) -> list[float | None]:
    """Hours of each cell's training, by the method of its estimate with this name."""
    return [
        getattr(cost, name)(resolved.config, steps=resolved.config.train.steps)
        for resolved, cost in zip(cells, costs, strict=True)
    ]


def show_cells(cells: list[ResolvedCell], costs: list[Expected] | None, *, title: str) -> None:
    """Print the cells as a table, with the memory and times expected of each if they are known."""
    from asyncpp_cli.base.console import show_table
    from asyncpp_cli.base.tables import Fit, printed

    axes = list(cells[0].cell.axes)
    estimates: dict[str, list[float | None]] = {}
    if costs is not None:
        estimates = {"GB per rank": [cost.memory_gb for cost in costs]}
        estimates["step s"] = [cost.step_seconds for cost in costs]
        estimates |= {unit: _hours(cells, costs, name) for name, unit in _HOURS.items()}
    known = {name: values for name, values in estimates.items() if any(each is not None for each in values)}
    rows = []
    for place, resolved in enumerate(cells):
        row = [resolved.cell.id, *(printed(key, resolved.cell.axes[key]) for key in axes)]
        values = (each[place] for each in known.values())
        rows.append([*row, *("" if value is None else f"{value:.3g}" for value in values)])
    columns = ["run", *axes, *known]
    # Axes can be left out, since the id contains them.
    fit = Fit(share=columns[1:], hide=[*reversed(known), *reversed(axes)])
    show_table(columns, rows, title=f"{title}: {len(cells)} cell{'s' * (len(cells) != 1)}", fit=fit)
