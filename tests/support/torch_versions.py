"""What versions of torch cannot do."""

from __future__ import annotations

from importlib.metadata import version

import pytest

FAILS_COMPILED_IN_FLOAT64 = version("torch").startswith("2.11.")
"""Its own compiled backward of attention, on a CPU: `expected scalar type Double but found Float`."""

compiles_float64 = pytest.mark.skipif(
    FAILS_COMPILED_IN_FLOAT64, reason="torch 2.11's own compiled attention fails in float64"
)
