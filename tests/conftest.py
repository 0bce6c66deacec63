"""Which tests may run beside each other, where pytest-xdist spreads them (`--dist loadgroup`)."""

from __future__ import annotations

from pathlib import Path

import pytest

CLUSTER = Path(__file__).parent / "cluster"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file share what is dear to make, and all tests of the cluster share its queue."""
    for item in items:
        group = "cluster" if CLUSTER in item.path.parents else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
