"""Entry point of an array task, started by the batch script on the job's first node.

python -m asyncpp_cli.launch.job.array_entry array-K.json
"""

from __future__ import annotations

import signal
import sys

from asyncpp_cli.launch.common import early_signals


def main() -> None:
    """Execute the run of this array task; argument: the array's manifest."""
    # First of all: imports take seconds when many jobs start at once.
    early_signals.listen(signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)

    from asyncpp_cli.base.errors import exit_code_of
    from asyncpp_cli.launch.job.array_task import run_task

    sys.exit(exit_code_of(lambda: run_task(sys.argv[1])))


if __name__ == "__main__":
    main()
