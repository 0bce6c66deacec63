"""What holds for all tests: examples may take their time, and which tests may run beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

CLUSTER = Path(__file__).parent / "cluster"

# On a busy machine any example may take long.
settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What pytest-xdist keeps together (`--dist loadgroup`): the tests of a file, and all of the cluster.

    The tests of a file share what is dear to make, and those of the cluster its queue.
    """
    for item in items:
        group = "cluster" if CLUSTER in item.path.parents else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
