"""`asyncpp launch`: runs the cells of an experiment that are not completed."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from asyncpp_cli.commands.arguments import ExperimentOrRun, MoreRuns, with_options
from asyncpp_cli.launch.common.options import LaunchOptions


@with_options
def launch(
    folder: ExperimentOrRun,
    runs: MoreRuns = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only those that failed or are damaged.")] = False,
    timeout: Annotated[bool, typer.Option("--timeout", help="Only those that reached a time limit.")] = False,
    oom: Annotated[bool, typer.Option("--oom", help="Only those that ran out of memory.")] = False,
    site: Annotated[
        str | None,
        typer.Option(
            "--site",
            metavar="NAME",
            help="Site profile; default: `local`, this machine, or where a chosen run was submitted last.",
        ),
    ] = None,
    print_as: Annotated[
        str | None,
        typer.Option(
            "--print",
            metavar="FORMAT",
            help="Start nothing; print a cluster's job scripts (sbatch), or the runs for another scheduler "
            "(commands, json).",
        ),
    ] = None,
    *,
    options: LaunchOptions,
) -> None:
    """Run the cells of an experiment that are not completed.

    Shows a line for each run that starts or ends, and on a terminal a bar. Launching again is safe.

    With RUN, --failed, --timeout or --oom only those are started; a damaged one is repaired first: its status
    is rebuilt, and the damaged file is kept beside it.

    Completed runs, and runs of another launch, are left alone. Failed and interrupted runs resume from their
    newest valid checkpoint. On Ctrl-C the runs started here save and end as interrupted; launch again to
    resume. Exit code 0 if all runs are completed, 1 if not, 130 after Ctrl-C.

    With --until each run pauses after that step, evaluated and saved; its learning rate is that of its whole
    length, so a later launch goes on to the same numbers.

    On a cluster (see docs/slurm.md) the runs are submitted as jobs, except those that are completed, running
    or queued. With --wait the command stays until they have ended; Ctrl-C does not end the jobs.

    With --print nothing is started and nothing is claimed (docs/anywhere.md): the scripts of a cluster's
    jobs; or for every run that is neither completed nor running, its ranks, nodes, GPUs, memory, time, and
    the command of each node.
    """
    from asyncpp_cli.base.errors import INTERRUPTED, UserError
    from asyncpp_cli.launch.described import described_runs, printed
    from asyncpp_cli.launch.start import chosen_by_site, launch_experiment
    from asyncpp_cli.runs.experiment_folder import runs_named
    from asyncpp_cli.sites.profile import LOCAL, find_site

    profile = find_site(site or LOCAL)
    experiment, named = runs_named(folder, runs)
    if print_as is not None:
        if failed or timeout or oom or replace(options, replay=False) != LaunchOptions():
            raise UserError("--print takes only --site and --replay beside the runs")
        only = [run.id for run in named] or None
        if print_as == "sbatch":
            if profile.scheduler == LOCAL:
                raise UserError("--print sbatch: accepted with --site NAME of a cluster")
            from asyncpp_cli.launch.cluster import show_scripts

            show_scripts(experiment, profile, replace(options, only=only))
            return
        described = described_runs(experiment, profile, only=only, replay=options.replay)
        print(printed(print_as, described))
        return
    by_site: dict[str, list[str] | None] = {site or LOCAL: None}
    if named or failed or timeout or oom:
        by_site = chosen_by_site(experiment, named, failed=failed, timeout=timeout, oom=oom, site=site)
    code = 0
    for name, only in by_site.items():
        code = max(code, launch_experiment(experiment, replace(options, site=name, only=only)))
        if code == INTERRUPTED:
            break
    raise typer.Exit(code)
