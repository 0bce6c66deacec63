"""A task of an array: what sbatch starts, once on its first node, as

python -m asyncpp_cli.cluster.array_task array-K.json
"""

from __future__ import annotations

import signal
import sys

from asyncpp_cli.cluster import told


def main() -> None:
    """Run the run that this array task stands for."""
    # Before anything else is imported, which takes seconds where many jobs begin at once.
    told.listen(signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)

    from asyncpp_cli.cluster.batch import run_task

    sys.exit(run_task(sys.argv[1]))


if __name__ == "__main__":
    main()
