"""Runs the command `on_end` of a site profile when a launch has ended, here or in a last small job.

python -m asyncpp_cli.launch.submission.end_message end.json
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncpp_cli.base.atomic_files import write_record
from asyncpp_cli.base.console import say
from asyncpp_cli.base.errors import exit_code_of
from asyncpp_cli.launch.submission import sbatch
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.runs.status import State
from asyncpp_cli.sites.profile import Site
from asyncpp_cli.slurm.submissions import Submission, read_submissions
from stages.config.records import FileRecord, read_record

_SECONDS = 60
"""Timeout of the command."""
_TOLD = "end-told"
"""Name of a file in the submission's folder, once its end has been told."""
_FILE = "end.json"
_MINUTES = "3"
"""Time limit of the last job."""
_MEMORY = "500M"
_FLAGS_OF_RUNS = ("exclusive", "gres", "gpus", "mem-per-cpu", "time", "mem")
"""Flags of a profile that ask for more than the last job needs."""


class _Notice(FileRecord, frozen=True, kw_only=True):
    """Content of end.json: what the last job of a launch runs."""

    on_end: list[str]
    site_file: str


def tell_end(experiment: Experiment, command: Sequence[str], *, source: Path) -> None:
    """Run `command` with a sentence on the experiment as its last word, without a shell.

    A command that fails is a remark: the launch has ended as it has.

    Args:
        experiment: whose launch has ended.
        command: `on_end` of the site; empty: nothing is run.
        source: file of the site's profile.
    """
    if not command:
        return
    states = [current_status(run).state for run in experiment.runs]
    completed = sum(state == State.COMPLETED for state in states)
    sentence = f"{experiment.name}: {completed} of {len(states)} runs completed in {experiment.folder}"
    facts = {
        "ASYNCPP_FOLDER": str(experiment.folder.absolute()),
        "ASYNCPP_COMPLETED": str(completed),
        "ASYNCPP_RUNS": str(len(states)),
    }
    try:
        ended = subprocess.run(
            [*command, sentence],
            env=dict(os.environ) | facts,
            stdin=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"on_end of {source}: {error}", one_line=True)
        return
    if ended.returncode != 0:
        say(f"on_end of {source}: {command[0]} ended with exit code {ended.returncode}", one_line=True)


def claim_end(experiment: Experiment, *, submission: str | None = None) -> bool:
    """Claim to tell that the experiment's jobs have ended; returns whether the caller is the one to do so,
    which is true once per submission.

    Args:
        experiment: the experiment.
        submission: name of the caller's submission, which must be the last one; None: any.
    """
    submissions = [entry for entry in read_submissions(experiment).all if entry.state != "withdrawn"]
    if not submissions:
        return submission is None
    last = submissions[-1]
    if submission not in (None, last.name):
        return False  # a later launch tells its own end
    try:
        (last.folder / _TOLD).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def submit_end_job(site: Site, submission: Submission, *, after: Sequence[str]) -> str:
    """Submit the last job of a launch, which starts when the jobs `after` have ended in whatever way; returns
    SLURM's id for it.

    Raises:
        SlurmError: sbatch refuses; the message is sbatch's.
    """
    folder = submission.folder.absolute()
    write_record(folder / _FILE, _Notice(on_end=site.on_end, site_file=str(site.file.absolute())))
    flags = {name: value for name, value in site.flags.items() if name not in _FLAGS_OF_RUNS}
    memory = None if site.memory is None else _MEMORY
    job = sbatch.small_job(
        submission.end,
        [submission.interpreter, "-P", "-m", "asyncpp_cli.launch.submission.end_message", _FILE],
        after=after,
        code=submission.code,
        output="end-%j.out",
    )
    return sbatch.submit(replace(site, time=_MINUTES, memory=memory, flags=flags), folder, job)


def main() -> None:
    """Tell the end of the experiment, unless another job or command has, or will."""
    sys.exit(exit_code_of(_tell))


def _tell() -> int:
    file = Path(sys.argv[1]).absolute()
    notice = read_record(file, _Notice)
    experiment = open_experiment(file.parents[2])
    # Claimed first: SLURM may start the job again at any time, and a second message is worse than none.
    if claim_end(experiment, submission=file.parent.name):
        tell_end(experiment, notice.on_end, source=Path(notice.site_file))
    return 0


if __name__ == "__main__":
    main()
