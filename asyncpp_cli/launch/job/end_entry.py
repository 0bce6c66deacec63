"""Entry point of the job that follows all others of a launch, and runs the site's `on_end`.

python -m asyncpp_cli.launch.job.end_entry end.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from asyncpp_cli.atomic_files import read_json
from asyncpp_cli.errors import exit_code_of
from asyncpp_cli.launch.end_message import claim_end, tell_end
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import FORMAT


def main() -> None:
    """Tell the end of the experiment, unless another job or command has, or will."""
    sys.exit(exit_code_of(_tell))


def _tell() -> int:
    file = Path(sys.argv[1]).absolute()
    content = read_json(file, newest_format=FORMAT)
    experiment = open_experiment(file.parents[2])
    # Claimed first: SLURM may start the job again at any time, and a second message is worse than none.
    if claim_end(experiment, submission=file.parent.name):
        tell_end(experiment, content["on_end"], source=Path(content["site_file"]))
    return 0


if __name__ == "__main__":
    main()
