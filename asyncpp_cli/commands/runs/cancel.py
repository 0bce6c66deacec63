"""`asyncpp cancel`: ends an experiment's runs, wherever they run."""

from __future__ import annotations

from asyncpp_cli.commands.arguments import ExperimentOrRun, MoreRuns


def cancel(
    folder: ExperimentOrRun,
    runs: MoreRuns = None,
) -> None:
    """Cancel queued and running runs. Running ones save first; launch again to resume them.

    An open launch, here or elsewhere, does not start any of them afterwards.

    Returns when all of them have ended, so that they can be launched again at once.
    """
    from asyncpp_cli.base.console import say
    from asyncpp_cli.launch.cancel import cancel_runs
    from asyncpp_cli.runs.experiment_folder import runs_named

    experiment, chosen = runs_named(folder, runs)
    queued, running = cancel_runs(experiment, chosen or experiment.runs)
    say(f"Cancelled: {queued} queued, {running} running.")
