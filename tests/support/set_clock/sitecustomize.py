"""Sets the wall clock of every Python process that has this folder on its PYTHONPATH.

The file ASYNCPP_TEST_CLOCK holds two numbers of seconds, and may change at any time: by how much the clocks
are ahead, and by how much more each rank's is than that of the rank before. Files get their times from the
kernel, as from a file server.
"""

import os
import time

_real = time.time, time.time_ns, time.localtime, time.gmtime, time.strftime


def _ahead() -> float:
    with open(os.environ["ASYNCPP_TEST_CLOCK"]) as file:  # noqa: PTH123 (nothing more is imported here)
        ahead, per_rank = file.read().split()
    # Asked each time: a process that was forked to be a rank learns which only then.
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0
    return float(ahead) + int(rank) * float(per_rank)


if "ASYNCPP_TEST_CLOCK" in os.environ:
    time.time = lambda: _real[0]() + _ahead()
    time.time_ns = lambda: _real[1]() + int(_ahead() * 1e9)
    time.localtime = lambda seconds=None: _real[2](time.time() if seconds is None else seconds)
    time.gmtime = lambda seconds=None: _real[3](time.time() if seconds is None else seconds)
    time.strftime = lambda text, at=None: _real[4](text, time.localtime() if at is None else at)
