"""Submits a job that scores a run's checkpoints as they appear."""

from __future__ import annotations

from asyncpp_cli.base.console import tell
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.launch.common import snapshot
from asyncpp_cli.launch.submission import sbatch
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.scoring.evaluation import Asked, check_harness
from asyncpp_cli.sites.profile import LOCAL, find_site
from asyncpp_cli.slurm.client import SlurmError
from asyncpp_cli.slurm.submissions import job_name, new_folder


def submit_evaluation(run: Run, asked: Asked, *, site: str) -> None:
    """Submit the job, with one GPU where the site has any.

    Raises:
        UserError: the site cannot run it, or refuses it.
    """
    check_harness()
    profile = find_site(site)
    if profile.name == LOCAL or profile.scheduler != "slurm":
        raise UserError(f"--site {site} is this machine; without --site it scores here, with --follow")
    if profile.container is not None:
        raise UserError(
            f"{profile.file}: container: evaluate runs outside of containers; accepted: a site without"
        )
    experiment = open_experiment(run.folder.absolute().parent.parent)
    sbatch.check_folder_name(experiment.folder)
    folder = new_folder(experiment)
    options = {
        "--include": asked.include,
        "--limit": asked.limit,
        "--shots": asked.shots,
        "--batch-size": asked.batch_size,
        "--tokenizer": asked.tokenizer,
        "--device": asked.device,
    }
    words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    tasks = ["--tasks", ",".join(asked.tasks)]
    command = ["evaluate", str(run.folder.absolute()), "--follow", *tasks, *words]
    try:
        job = sbatch.submit_job(
            profile,
            folder.absolute(),
            name=job_name(experiment, folder, "evaluate"),
            nodes=1,
            command=[snapshot.interpreter(), "-P", "-m", "asyncpp_cli", *command],
            after=[],
            code=snapshot.copy_code(experiment.code).name,
            output="evaluate-%j.out",
            gpus=min(1, profile.gpus_per_node),
        )
    except SlurmError as error:
        raise UserError(f"{profile.file}: {sbatch.profile_keys(str(error))}: {error}") from None
    tell(f"job {job} scores the checkpoints of {run.id}; its output: {folder}/evaluate-{job}.out")
