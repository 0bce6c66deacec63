"""`asyncpp optimizers`: the optimizers and corrections, with their memory and options."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="List the optimizers and corrections, with memory and sources.")


@app.command("list")
def list_optimizers(
    as_json: Annotated[bool, typer.Option("--json", help="The optimizers as JSON.")] = False,
) -> None:
    """List the optimizers and the corrections for stale gradients.

    Bytes are those kept for each parameter of a square float32 matrix in a block, in addition to weights
    and gradients; embedding, head and vectors keep AdamW's 8 under the methods that leave them to AdamW. The
    step counter of a tensor is not counted.
    """
    import json

    from asyncpp_cli.base.console import say, show_table
    from asyncpp_cli.base.tables import Fit
    from optimizers import CORRECTIONS, METHODS

    if as_json:
        rows = [
            {
                "name": method.name,
                "summary": method.summary,
                "state_bytes_per_parameter": method.state_bytes_per_parameter,
                "matrix_state": method.matrix_state,
                "reference": method.reference,
                "defaults": {key: option.default for key, option in method.options.items()},
            }
            for method in METHODS.values()
        ]
        print(json.dumps(rows, indent=2))
        return
    show_table(
        ["optimizer", "bytes", "what it is", "paper", "defaults"],
        [
            [
                method.name,
                f"{method.state_bytes_per_parameter:g}",
                method.summary,
                method.reference,
                " ".join(f"{key}={_shown(option.default)}" for key, option in method.options.items()),
            ]
            for method in METHODS.values()
        ],
        title="Optimizers (optimizer.name); bytes kept for each parameter",
        fit=Fit(hide=["defaults", "paper"], fold=["what it is"]),
    )
    print()
    show_table(
        ["correction", "bytes", "what it is", "wants", "paper"],
        [
            [
                entry.name,
                f"{entry.state_bytes_per_parameter:g}",
                entry.summary,
                entry.needs.value,
                entry.reference,
            ]
            for entry in CORRECTIONS.values()
        ],
        title="Corrections; bytes kept beyond the optimizer's",
        fit=Fit(hide=["paper", "wants"], fold=["what it is"]),
    )
    say("What the settings of one of them mean: asyncpp optimizers show NAME")


def _words(incomplete: str) -> list[str]:
    """Names of optimizers, for the shell's completion."""
    from optimizers import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


@app.command("show")
def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="An optimizer or correction that `list` shows.",
            autocompletion=_words,
        ),
    ],
) -> None:
    """Show one optimizer or correction: what it keeps, by which rules it works, and its settings with
    defaults."""
    from asyncpp_cli.base.console import show_line, show_table
    from asyncpp_cli.base.errors import UserError
    from asyncpp_cli.base.tables import Fit
    from optimizers import CORRECTIONS, METHODS
    from optimizers.grouping import DECAYED, Role
    from stages.config.keys import unknown

    if name in METHODS:
        method = METHODS[name]
        show_line(f"{name}: {method.summary} ({method.reference})")
        print(f"Set by optimizer.name: {name}")
        print(f"Keeps for a matrix: {method.matrix_state} values\n")
        show_table(
            ["parameters", "rule", "weight decay"],
            [[role.value, method.rules[role.value], "yes" if role in DECAYED else "no"] for role in Role],
            title="Rules",
            fit=Fit(fold=["rule"]),
        )
        print()
        options = method.options
    elif name in CORRECTIONS:
        correction = CORRECTIONS[name]
        show_line(f"{name}: {correction.summary} ({correction.reference})")
        print(f"Set by {correction.set_by or f'correction.name: {name}'}")
        print(f"Keeps for each parameter: {correction.values_per_parameter} values\n")
        options = correction.options
    else:
        raise UserError(unknown(name, [*METHODS, *CORRECTIONS]))
    show_table(
        ["setting", "default", "accepted", "meaning"],
        [[key, _shown(option.default), option.accepts(), option.meaning] for key, option in options.items()],
        title="Settings",
        fit=Fit(fold=["accepted", "meaning"]),
    )


def _shown(value: float | bool | str) -> str:
    """An option's value as it is written in a template."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{value:g}"
