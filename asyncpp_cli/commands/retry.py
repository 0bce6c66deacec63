"""`asyncpp retry`: start runs again that did not complete, chosen by why they did not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.errors import UserError

if TYPE_CHECKING:
    from asyncpp_cli.runs import Run


def retry(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the experiment.")],
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Ids of runs, or their beginnings.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="All that failed, or are damaged.")] = False,
    timeout: Annotated[bool, typer.Option("--timeout", help="All that a time limit ended.")] = False,
    oom: Annotated[bool, typer.Option("--oom", help="All that ran out of memory.")] = False,
    site: Annotated[
        str | None,
        typer.Option("--site", metavar="NAME", help="Where; without: where the run was submitted last."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="On a cluster: stay, and show how they go.")] = False,
    retries: Annotated[
        int | None,
        typer.Option("--retries", metavar="N", min=0, help="How often a run that fails is started again."),
    ] = None,
) -> None:
    """Start chosen runs again, from their newest valid checkpoint; the others are left as they are.

    A damaged run is set right first: its status is made anew, and the damaged file stays beside it.

    Runs that are completed, queued or going on are left alone whatever is said.
    """
    from asyncpp_cli.cluster.ending import to_retry, why_left_alone
    from asyncpp_cli.cluster.sites import LOCAL, find_site
    from asyncpp_cli.cluster.submit import Choices
    from asyncpp_cli.commands.launch import launch_here, launch_there
    from asyncpp_cli.console import command, say
    from asyncpp_cli.runs import chosen_runs, open_experiment

    if not (runs or failed or timeout or oom):
        raise UserError("say which runs: --failed, --timeout, --oom, or their ids")
    experiment = open_experiment(folder)
    named = {run.id for run in chosen_runs(experiment, runs)} if runs else set()
    chosen = to_retry(experiment, named=named, failed=failed, timeout=timeout, oom=oom)
    for line in why_left_alone(experiment, named):
        say(line)
    if not chosen:
        kinds = {"failed": failed, "were ended by a time limit": timeout, "ran out of memory": oom}
        wanted = " or ".join(kind for kind, is_wanted in kinds.items() if is_wanted)
        if wanted:
            say(f"None of the {len(experiment.runs)} runs {wanted}: {command('status', folder)}")
        return
    for run in experiment.runs:
        if run.id in chosen:
            _set_right(run, chosen)
    code = 0
    for where, ids in _by_site(chosen, site).items():
        place = find_site(where)
        if place.scheduler == LOCAL:
            code = max(code, launch_here(folder, replay=False, max_parallel=None, only=ids))
        else:
            choices = Choices(replay=False, max_parallel=None, retries=retries, report=False)
            code = max(code, launch_there(experiment, place, choices, wait=wait, only=ids))
    raise typer.Exit(code)


def _set_right(run: Run, chosen: dict[str, str]) -> None:
    """Make a damaged run ready to go on; one that cannot be is not among the `chosen` any more."""
    from asyncpp_cli.cluster.repair import set_right
    from asyncpp_cli.console import say

    try:
        set_right(run)
    except UserError as error:
        del chosen[run.id]
        say(f"left out: {error}")


def _by_site(chosen: dict[str, str], site: str | None) -> dict[str, list[str]]:
    """Runs by where they are to go."""
    found: dict[str, list[str]] = {}
    for run_id, submitted_to in chosen.items():
        found.setdefault(site or submitted_to or "local", []).append(run_id)
    return found
