"""The command `asyncpp`: its sub-commands, and how errors end it."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.main

from asyncpp_cli.base.console import abandon_output, make_fit, say
from asyncpp_cli.base.errors import FAILED, WRONG, UserError, refusal_of
from asyncpp_cli.commands.machine import data
from asyncpp_cli.commands.machine.doctor import doctor
from asyncpp_cli.commands.machine.plan import plan
from asyncpp_cli.commands.reference import optimizers, schedule, templates, theory
from asyncpp_cli.commands.results.diff import diff
from asyncpp_cli.commands.results.export import export
from asyncpp_cli.commands.results.logs import logs
from asyncpp_cli.commands.results.mirror import mirror
from asyncpp_cli.commands.results.report import report
from asyncpp_cli.commands.results.status import status
from asyncpp_cli.commands.runs.cancel import cancel
from asyncpp_cli.commands.runs.extend import extend
from asyncpp_cli.commands.runs.launch import launch
from asyncpp_cli.commands.runs.quickstart import quickstart
from asyncpp_cli.commands.runs.rehearse import rehearse
from asyncpp_cli.commands.runs.remove import remove
from asyncpp_cli.commands.runs.sweep import sweep
from asyncpp_cli.commands.runs.train import train
from asyncpp_cli.commands.runs.tune import tune

# Some versions of Typer vendor Click: find the class by its name.
_CommandLineError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app = typer.Typer(
    name="asyncpp",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure what asynchronous pipeline-parallel pretraining costs in loss and wins in throughput.",
)


_Context: Any = next(
    kind for kind in typer.Context.__mro__ if kind.__name__ == "Context" and kind is not typer.Context
)
_Formatter: Any = _Context.formatter_class


class _Help(_Formatter):  # type: ignore[misc]
    """Help without the types that newer versions of Typer print after the names of arguments."""

    def write_dl(self, rows: Sequence[tuple[str, str]], *args: Any, **kwargs: Any) -> None:
        shown = [
            (name if name.startswith("-") else re.sub(r" <[^<>]*>$", "", name), text) for name, text in rows
        ]
        super().write_dl(shown, *args, **kwargs)


_Context.formatter_class = _Help


def _print_version(wanted: bool) -> None:
    if wanted:
        from asyncpp_cli.base.version import asyncpp_version

        typer.echo(f"asyncpp {asyncpp_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Options before the sub-command; their help text is `help` above."""


for command in (
    quickstart,
    plan,
    sweep,
    rehearse,
    tune,
    launch,
    status,
    logs,
    cancel,
    report,
    diff,
    extend,
    remove,
    export,
    mirror,
    doctor,
):
    app.command()(command)
app.command(hidden=True)(train)  # launch starts it
app.add_typer(schedule.app, name="schedule")
app.add_typer(optimizers.app, name="optimizers")
app.add_typer(theory.app, name="theory")
app.add_typer(data.app, name="data")
app.add_typer(templates.app, name="templates")


def click_command() -> Any:
    """The command line as a Click command."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line and exit the process.

    The only place where an error becomes one line on standard error and an exit code
    (`asyncpp_cli.base.errors`) or, for a bug of asyncpp, a traceback that says where to report it.
    """
    make_fit()
    try:
        words = [_with_home(word) for word in sys.argv[1:]]
        code = click_command()(words, prog_name="asyncpp", standalone_mode=False)
        sys.stdout.flush()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # a panic of a Rust library is not an `Exception`
        _exit_for(error)
    sys.exit(code if isinstance(code, int) else 0)


def _with_home(word: str) -> str:
    """A word of the command line with `~` for a home folder expanded: shells leave it in `--out=~/x`.

    Raises:
        UserError: no home folder is known.
    """
    option, equals, path = word.partition("=") if word.startswith("-") else ("", "", word)
    if not re.fullmatch(r"~[^/=]*/.*|~", path, re.DOTALL):
        return word
    try:
        return f"{option}{equals}{Path(path).expanduser()}"
    except RuntimeError:
        raise UserError(f"{word}: no such home folder is known; set HOME, or write ./{path}") from None


def _exit_for(error: BaseException) -> NoReturn:
    """Exit the process because of an error.

    Raises:
        BaseException: the error itself, if it is a bug of asyncpp.
    """
    if isinstance(error, _CommandLineError):
        _exit_for_command_line(error)
    if _is_closed_pipe(error):
        # As in `asyncpp status ... | head`.
        abandon_output()
        sys.exit(FAILED)
    refusal = refusal_of(error)
    if refusal is None:
        error.add_note(_where_to_report())
        raise error
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    abandon_output()
    say(f"asyncpp: error: {refusal.message}", one_line=True)
    sys.exit(refusal.code)


def _exit_for_command_line(error: BaseException) -> NoReturn:
    """Exit because the command line is invalid or empty."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]
    else:
        context = getattr(error, "ctx", None)
        hint = f" ({context.command_path} --help shows what is accepted)" if context is not None else ""
        message = _plain(error.format_message().rstrip("."))  # type: ignore[attr-defined]
        say(f"asyncpp: error: {message}{hint}", one_line=True)
    sys.exit(WRONG)


_PLAIN = (
    (r"Invalid value for '([^']*)': ", r"\1: "),
    (r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", r"unexpected argument: \1"),
    ("Value error, ", ""),
    ("Input should be a valid integer, .*", "accepted: a whole number"),
    ("Input should be a valid number, .*", "accepted: a number"),
    (r"Input should be greater than or equal to (\S+)", r"accepted: \1 or more"),
    (r"Input should be less than or equal to (\S+)", r"accepted: \1 or less"),
    (
        r"No such option: (-m|--multirun)\b.*",
        r"\1: several values are an axis, as in 'matrix.train.steps=[30,40]'",
    ),
)
"""What Typer and the libraries below it say, in the words that are used elsewhere."""


def _plain(message: str) -> str:
    for pattern, words in _PLAIN:
        message = re.sub(pattern, words, message)
    if choice := re.fullmatch(r"(.*?)'([^']*)' is not one of ('.*')", message):
        from stages.config.keys import unknown

        message = choice[1] + unknown(choice[2], re.findall("'([^']*)'", choice[3]))
    return message


def _is_closed_pipe(error: BaseException) -> bool:
    return isinstance(error, BrokenPipeError) and error.filename in (None, "standard output")


def _where_to_report() -> str:
    from importlib.metadata import metadata

    from asyncpp_cli.base.version import asyncpp_version

    urls = dict(url.split(", ", 1) for url in metadata("asyncpp").get_all("Project-URL") or [])
    recipient = urls.get("Issues", "the maintainers")
    return (
        f"This is a bug of asyncpp {asyncpp_version()}. "
        f"Please report it to {recipient}, with the lines above and the command."
    )
