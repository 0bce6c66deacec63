"""The command `asyncpp`: which sub-commands there are, and how it ends."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from asyncpp_cli.commands import data, optimizers, schedule, templates, theory
from asyncpp_cli.commands.cancel import cancel
from asyncpp_cli.commands.doctor import doctor
from asyncpp_cli.commands.export import export
from asyncpp_cli.commands.launch import launch
from asyncpp_cli.commands.logs import logs
from asyncpp_cli.commands.mirror import mirror
from asyncpp_cli.commands.plan import plan
from asyncpp_cli.commands.profile import profile
from asyncpp_cli.commands.quickstart import quickstart
from asyncpp_cli.commands.report import report
from asyncpp_cli.commands.retry import retry
from asyncpp_cli.commands.status import status
from asyncpp_cli.commands.sweep import sweep
from asyncpp_cli.commands.train import train
from asyncpp_cli.errors import UserError

app = typer.Typer(
    name="asyncpp",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure what asynchronous pipeline-parallel pretraining costs in loss and wins in throughput.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"asyncpp {version('asyncpp')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """What the command takes before a sub-command; its text is `help` above."""


for command in (
    quickstart,
    plan,
    profile,
    sweep,
    launch,
    status,
    logs,
    cancel,
    retry,
    report,
    export,
    mirror,
    train,
    doctor,
):
    app.command()(command)
app.add_typer(schedule.app, name="schedule")
app.add_typer(optimizers.app, name="optimizers")
app.add_typer(theory.app, name="theory")
app.add_typer(data.app, name="data")
app.add_typer(templates.app, name="templates")


def main() -> None:
    """Run the command line: exit code 2 and one line on standard error where the user made a mistake."""
    try:
        app()
    except UserError as error:
        message = " ".join(str(error).split())
        print(f"asyncpp: error: {message}", file=sys.stderr)
        sys.exit(2)
