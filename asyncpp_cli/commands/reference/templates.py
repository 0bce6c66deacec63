"""`asyncpp templates`: lists and shows the shipped templates."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="List and show the shipped templates.")


@app.command("list")
def list_templates() -> None:
    """List the shipped templates: experiments, model sizes and sites."""
    from asyncpp_cli.console import show_table
    from asyncpp_cli.experiment.shipped import (
        RECOMMENDED,
        TEMPLATE_KINDS,
        TEMPLATES_FOLDER,
        find_template,
        template_names,
    )
    from asyncpp_cli.experiment.yaml_data import read_mapping
    from asyncpp_cli.tables import Fit

    rows = []
    for folder, kind in TEMPLATE_KINDS.items():
        for name in template_names(folder):
            content = read_mapping(find_template(folder, name, beside=None))
            about = content.get("description") or ", ".join(
                f"{key} {value}" for key, value in content.items() if key != RECOMMENDED
            )
            rows.append([kind, name, " ".join(about.split())])
    title = f"{len(rows)} templates in {TEMPLATES_FOLDER}"
    show_table(["kind", "name", "about"], rows, title=title, fit=Fit(fold=["about"]))


@app.command("show")
def show(name: Annotated[str, typer.Argument(metavar="NAME", help="A name listed by `list`.")]) -> None:
    """Print a template, to read or to start your own from."""
    from asyncpp_cli.errors import UserError
    from asyncpp_cli.experiment.shipped import TEMPLATE_KINDS, find_template, template_names

    for folder in TEMPLATE_KINDS:
        if name in template_names(folder):
            sys.stdout.write(find_template(folder, name, beside=None).read_text(encoding="utf-8"))
            return
    known = ", ".join(name for folder in TEMPLATE_KINDS for name in template_names(folder))
    raise UserError(f"unknown template {name!r}; accepted: {known}")
