"""The small job that follows all others of a launch and runs the site's `on_end`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asyncpp_cli.atomic_files import write_json
from asyncpp_cli.launch.sites import Site
from asyncpp_cli.launch.slurm.submissions import Submission
from asyncpp_cli.launch.submission import sbatch
from asyncpp_cli.runs.run_folder import FORMAT

_FILE = "end.json"
_MINUTES = "3"
_MEMORY = "500M"
_FLAGS_OF_RUNS = ("exclusive", "gres", "gpus", "mem-per-cpu", "time", "mem")
"""Flags of a profile that ask for more than this job needs."""


def submit_end_job(site: Site, submission: Submission, *, after: Sequence[str]) -> str:
    """Submit it, to start when the jobs `after` have ended in whatever way; SLURM's id for it.

    Raises:
        SlurmError: sbatch refuses; the message is sbatch's.
    """
    folder = submission.folder.absolute()
    content = {"format": FORMAT, "on_end": site.on_end, "site_file": str(site.file.absolute())}
    write_json(folder / _FILE, content)
    flags = {name: value for name, value in site.flags.items() if name not in _FLAGS_OF_RUNS}
    memory = None if site.memory is None else _MEMORY
    return sbatch.submit_job(
        replace(site, time=_MINUTES, memory=memory, flags=flags),
        folder,
        name=submission.end,
        nodes=1,
        command=[submission.interpreter, "-P", "-m", "asyncpp_cli.launch.job.end_entry", _FILE],
        after=after,
        code=submission.code,
        output="end-%j.out",
    )
