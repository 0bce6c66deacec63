"""`asyncpp completion`: the script with which a shell completes asyncpp's command lines."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer


class Shell(StrEnum):
    """Shells that are served; keys of `asyncpp_cli.completion.SCRIPTS`."""

    BASH = "bash"
    ZSH = "zsh"


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash or zsh.")],
) -> None:
    """Print the script for completion in bash or zsh.

    It completes commands, options, experiments, runs, templates, sites and keys.

    In ~/.bashrc: eval "$(asyncpp completion bash)". In ~/.zshrc, after compinit: eval "$(asyncpp completion
    zsh)".
    """
    from asyncpp_cli.completion import SCRIPTS

    sys.stdout.write(SCRIPTS[shell])
