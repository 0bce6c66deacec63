"""`asyncpp retry`: starts chosen runs again that did not complete."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.completion import experiments, runs_of_folder, sites
from asyncpp_cli.errors import UserError

if TYPE_CHECKING:
    from asyncpp_cli.runs.run_folder import Run


def retry(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the experiment.", autocompletion=experiments)
    ],
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", help="Ids of runs, or their beginnings.", autocompletion=runs_of_folder
        ),
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="All that failed or are damaged.")] = False,
    timeout: Annotated[bool, typer.Option("--timeout", help="All that reached a time limit.")] = False,
    oom: Annotated[bool, typer.Option("--oom", help="All that ran out of memory.")] = False,
    site: Annotated[
        str | None,
        typer.Option(
            "--site",
            metavar="NAME",
            help="Where to run; default: where each was submitted last.",
            autocompletion=sites,
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="On a cluster: stay and show progress.")] = False,
    retries: Annotated[
        int | None,
        typer.Option("--retries", metavar="N", min=0, help="How often a failed run is started again."),
    ] = None,
) -> None:
    """Start chosen runs again from their newest valid checkpoint.

    A damaged run is repaired first: its status is rebuilt, and the damaged file is kept beside it.

    Completed, queued and running runs are never started again.
    """
    from asyncpp.launching import launch_locally, launch_on_cluster
    from asyncpp_cli.console import command, say
    from asyncpp_cli.launch.retry import reasons_skipped, runs_to_retry
    from asyncpp_cli.launch.sites import LOCAL, find_site
    from asyncpp_cli.launch.submission.array_plan import LaunchOptions
    from asyncpp_cli.runs.experiment_folder import open_experiment, select_runs

    if not (runs or failed or timeout or oom):
        raise UserError("no runs chosen; accepted: --failed, --timeout, --oom, or ids of runs")
    experiment = open_experiment(folder)
    named = {run.id for run in select_runs(experiment, runs)} if runs else set()
    chosen = runs_to_retry(experiment, named=named, failed=failed, timeout=timeout, oom=oom)
    for line in reasons_skipped(experiment, named):
        say(line)
    if not chosen:
        kinds = {"failed": failed, "reached a time limit": timeout, "ran out of memory": oom}
        wanted = " or ".join(kind for kind, is_wanted in kinds.items() if is_wanted)
        if wanted:
            say(f"None of the {len(experiment.runs)} runs {wanted}: {command('status', folder)}")
        return
    for run in experiment.runs:
        if run.id in chosen:
            _repair(run, chosen)
    code = 0
    for name, ids in _by_site(chosen, site).items():
        profile = find_site(name)
        if profile.scheduler == LOCAL:
            code = max(code, launch_locally(folder, replay=False, max_parallel=None, only=ids))
        else:
            options = LaunchOptions(
                replay=False, max_parallel=None, retries=retries, report=False, tell_end=not wait
            )
            code = max(code, launch_on_cluster(experiment, profile, options, wait=wait, only=ids))
    raise typer.Exit(code)


def _repair(run: Run, chosen: dict[str, str]) -> None:
    """Repair a run if it is damaged; removed from `chosen` if that is impossible."""
    from asyncpp_cli.console import say
    from asyncpp_cli.runs.attempts.repair import repair_run

    try:
        repair_run(run)
    except UserError as error:
        del chosen[run.id]
        say(f"left out: {error}")


def _by_site(chosen: dict[str, str], site: str | None) -> dict[str, list[str]]:
    """Ids of the chosen runs by the site to start them at."""
    by_site: dict[str, list[str]] = {}
    for run_id, submitted_to in chosen.items():
        by_site.setdefault(site or submitted_to or "local", []).append(run_id)
    return by_site
