"""`asyncpp templates`: lists and shows the shipped templates."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="List and show the shipped templates.")


@app.command("list")
def list_templates(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list of kind, name, about and description.")
    ] = False,
) -> None:
    """List the shipped templates: experiments, model sizes and sites."""
    from asyncpp_cli.base.console import console, show_table
    from asyncpp_cli.experiment.shipped import TEMPLATE_KINDS, TEMPLATES_FOLDER, template_names

    records = [
        {"kind": kind, "name": name, **_described(folder, name)}
        for folder, kind in TEMPLATE_KINDS.items()
        for name in template_names(folder)
    ]
    if as_json:
        print(json.dumps(records, indent=1))
        return
    columns = ("kind", "name", "about")
    rows = [[record[column] for column in columns] for record in records]
    output = console()
    if output.is_terminal:
        room = output.width - sum(max(len(row[column]) for row in rows) + 2 for column in (0, 1))
        rows = [[*row[:2], textwrap.shorten(row[2], width=max(room, 8), placeholder=" …")] for row in rows]
    show_table(columns, rows, title=f"{len(rows)} templates in {TEMPLATES_FOLDER}")


def _described(folder: str, name: str) -> dict[str, str]:
    """What a template is about in a line, and its whole description."""
    from asyncpp_cli.experiment.shipped import find_template, read_model
    from asyncpp_cli.experiment.yaml_data import read_mapping
    from asyncpp_cli.runs.settings import with_settings
    from stages.config.run_config import RunConfig
    from stages.shape.families import describe

    if folder == "models":
        config = with_settings(RunConfig(), read_model(name, beside=None).settings)
        model, spec = config.model, describe(config.model)
        active = f", {spec.active_count:,} active" if model.experts else ""
        text = f"{model.layers} blocks of {model.width}, {spec.parameter_count:,} parameters{active}"
        return {"about": text, "description": text}
    text = " ".join(str(read_mapping(find_template(folder, name, beside=None))["description"]).split())
    return {"about": re.split(r"(?<=[.?])\s|: ", text)[0].rstrip("."), "description": text}


@app.command("show")
def show(name: Annotated[str, typer.Argument(metavar="NAME", help="A name listed by `list`.")]) -> None:
    """Print a template, to read or to start your own from."""
    from asyncpp_cli.base.errors import UserError
    from asyncpp_cli.experiment.shipped import TEMPLATE_KINDS, find_template, template_names
    from stages.config.keys import unknown

    for folder in TEMPLATE_KINDS:
        if name in template_names(folder):
            sys.stdout.write(find_template(folder, name, beside=None).read_text(encoding="utf-8"))
            return
    raise UserError(unknown(name, [name for folder in TEMPLATE_KINDS for name in template_names(folder)]))
