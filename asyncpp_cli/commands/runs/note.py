"""`asyncpp note`: adds a note or tags to a run, or shows them."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from asyncpp_cli.commands.arguments import OneRun


def note(
    run: OneRun,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="The note; without it and --tag, the notes are shown.")
    ] = "",
    tag: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Tag the run; can be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Show the notes as JSON.")] = False,
) -> None:
    """Add a note or tags to a run, or show them.

    They are kept in the run's folder and shown by `status` and `report`. They are not part of its id.
    """
    from asyncpp_cli.console import say, tell
    from asyncpp_cli.errors import UserError
    from asyncpp_cli.runs.experiment_folder import run_at
    from asyncpp_cli.runs.notes import add_note, notes_of
    from stages.records import plain

    named = run_at(run)
    if text or tag:
        if as_json:
            raise UserError("--json shows notes; leave out TEXT and --tag")
        add_note(named, text, tags=tag or [])
        say(f"Noted for {named.id}.")
        return
    notes = notes_of(named)
    if as_json:
        print(json.dumps([plain(each) for each in notes], indent=1))
        return
    for each in notes:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.time))
        tags = "".join(f" [{name}]" for name in each.tags)
        tell(f"{when} {each.by}:{tags} {each.text}".rstrip())
    if not notes:
        say(f"{named.id} has no notes.")
