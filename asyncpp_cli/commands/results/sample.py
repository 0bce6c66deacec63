"""`asyncpp sample`: text from a run's model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.base.numbers import finite
from asyncpp_cli.commands.arguments import OneRun


def sample(
    run_folder: OneRun,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Text to go on from; default: a new document.")
    ] = "",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, max=100_000, help="Most tokens to add.")
    ] = 200,
    temperature: Annotated[
        float,
        typer.Option(parser=finite, metavar="T", help="Divides the logits; 0: always the likeliest token."),
    ] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=2**63 - 1, help="Of the choices.")] = 0,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Checkpoint of step N instead of the newest.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Tokenizer, if the run's data does not have it.")
    ] = None,
) -> None:
    """Print a prompt and what a run's model adds to it.

    The same seed gives the same text. On a CPU, with the weights that are evaluated; each token reads at most
    `data.context` tokens before it.
    """
    from asyncpp_cli.base.console import tell
    from asyncpp_cli.base.errors import UserError
    from asyncpp_cli.runs.experiment_folder import run_at
    from asyncpp_cli.scoring.sample import sample_run

    if not 0 <= temperature <= 100:
        raise UserError(f"--temperature {temperature:g}: accepted: 0 to 100")
    run = run_at(run_folder)
    added = sample_run(
        run,
        prompt,
        tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        step=step,
        tokenizer=tokenizer,
    )
    tell(prompt + added)
