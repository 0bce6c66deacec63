"""`asyncpp templates`: what is shipped."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="List and show the shipped templates.")


@app.command("list")
def list_templates() -> None:
    """List the shipped templates: experiments, model sizes and sites."""
    from asyncpp_cli import templates
    from asyncpp_cli.console import show_table
    from asyncpp_cli.yaml_files import read_mapping

    rows = []
    for folder, kind in templates.KINDS.items():
        for name in templates.names(folder):
            content = read_mapping(templates.find(folder, name, beside=None))
            about = content.get("description") or ", ".join(
                f"{key} {value}" for key, value in content.items() if key != templates.RECOMMENDED
            )
            rows.append([kind, name, " ".join(about.split())])
    show_table(["kind", "name", "about"], rows, title=f"{len(rows)} templates in {templates.SHIPPED}")


@app.command("show")
def show(name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `list` shows.")]) -> None:
    """Print a template's text: to read, or as a start for one of your own."""
    from asyncpp_cli import templates
    from asyncpp_cli.errors import UserError

    for folder in templates.KINDS:
        if name in templates.names(folder):
            sys.stdout.write(templates.find(folder, name, beside=None).read_text(encoding="utf-8"))
            return
    known = ", ".join(name for folder in templates.KINDS for name in templates.names(folder))
    raise UserError(f"unknown template {name!r}; accepted: {known}")
