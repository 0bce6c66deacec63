"""The limit of open files of a connected process."""

from __future__ import annotations

import resource
from pathlib import Path

from stages.comm.process import connected
from stages.config.run_config import SiteConfig


def test_a_process_may_open_as_many_files_as_the_system_lets_it(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with connected(
            rank=0, size=1, local_rank=0, local_size=1, rendezvous=tmp_path, site=SiteConfig(device="cpu")
        ):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
