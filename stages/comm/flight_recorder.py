"""NCCL's flight recorder: the latest operations of every communicator, written if one times out. torch is
imported only to write."""

from __future__ import annotations

import contextlib
from collections.abc import MutableMapping
from pathlib import Path

_DUMP_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_SETTINGS = {
    # Operations kept per process; several steps of a pipeline.
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "20000",
    ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
}
"""Variables, each with its older name."""


def set_flight_recorder(environment: MutableMapping[str, str], *, folder: Path) -> None:
    """Switch it on, with dumps as `folder/nccl-RANK`; variables that are set are kept. Called before torch is
    imported."""
    for names, value in {**_SETTINGS, _DUMP_FILE: str(folder.resolve() / "nccl-")}.items():
        if not any(name in environment for name in names):
            environment[names[0]] = value


def write_operations(file: Path) -> bool:
    """Write the recorded operations as JSON; returns whether there are any. The process's watchdog ends a run
    before NCCL's timeout would write them."""
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return False
    with contextlib.suppress(OSError, RuntimeError):
        file.write_bytes(dump(includeCollectives=True, onlyActive=False))
        return True
    return False
