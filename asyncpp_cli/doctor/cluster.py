"""Whether a cluster takes the jobs of a site profile."""

from __future__ import annotations

import tempfile
from pathlib import Path

from asyncpp_cli.doctor.checks import Check, good, wrong
from asyncpp_cli.launch.common.arrays import JobShape
from asyncpp_cli.launch.submission import sbatch
from asyncpp_cli.launch.submission.sbatch import BatchJob, profile_keys
from asyncpp_cli.sites.profile import Site
from asyncpp_cli.slurm import client as slurm
from asyncpp_cli.slurm.client import SlurmError


def submission_check(site: Site) -> Check:
    """Whether sbatch accepts the script of the largest job that the profile allows; nothing is queued."""
    cpus = site.cpus_per_task or int(site.run.get("threads", 1))
    bounds = (site.gpus_per_node, site.tasks_per_node, (site.cpus_per_node or 0) // cpus)
    ranks, nodes = min((bound for bound in bounds if bound), default=1), site.max_nodes or 1
    shape = JobShape(
        nodes=nodes,
        tasks=ranks * nodes,
        tasks_per_node=ranks,
        cpus_per_task=cpus,
        gpus_per_node=ranks if site.gpus_per_node else 0,
    )
    job = BatchJob(name="asyncpp-doctor", shape=shape, tasks=1, code="", exclude=site.exclude or "")
    with tempfile.TemporaryDirectory(prefix="asyncpp-doctor-") as made:
        file = Path(made) / "job.sh"
        file.write_text(sbatch.array_script(site, Path(made), job))
        try:
            slurm.run_command(["sbatch", "--test-only", f"--chdir={made}", str(file)])
        except SlurmError as error:
            advice = f"change {site.file}: {profile_keys(str(error))}: sbatch refuses a job of {shape}"
            return wrong("submission", str(error), advice=advice)
    return good("submission", f"sbatch accepts a job of {shape} (--test-only)")
