"""What holds for all tests: no example has a time that it must take, and which may run beside which."""

import pytest
from hypothesis import HealthCheck, settings

# On a busy machine any example may take long.
settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_itemcollected(item: pytest.Item) -> None:
    """With several workers (`pytest -n 2`) the tests of a file stay together, and so do those of the cluster.

    Here and not where the collection is over: by then xdist has read the groups.
    """
    folder = item.path.parent.name
    item.add_marker(pytest.mark.xdist_group(folder if folder == "cluster" else item.path.stem))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of the cluster come first: they wait more than they compute, and the others run beside them."""
    items.sort(key=lambda item: item.path.parent.name != "cluster")
