"""The energy that a process's GPU took, by the counter of NVIDIA's driver (NVML)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.files import RankEnergy

NVML = "libnvidia-ml.so.1"
_UUID_LENGTH = 96
_PREFIX = "GPU-"


@contextmanager
def recorded_energy(attempt: Attempt, rank: int) -> Iterator[None]:
    """Record how many joules the process's GPU took while the block ran, if it tells.

    The counter is the GPU's: it includes whatever else ran on it.
    """
    before = energy_counters(NVML)
    try:
        yield
    finally:
        gpu = _used_gpu() if before else None
        after = energy_counters(NVML) if gpu in before else {}
        if gpu is not None and gpu in after:
            joules = (after[gpu] - before[gpu]) / 1000
            attempt.write(RankEnergy(gpu=gpu, joules=joules), rank)


def energy_counters(library: str) -> dict[str, int]:
    """Millijoules that each GPU of this machine has taken since its driver was loaded, by its UUID.

    GPUs that do not count (before Volta) are left out; empty without NVML.
    NVML API reference: nvmlDeviceGetTotalEnergyConsumption.

    Args:
        library: file name of NVML.
    """
    try:
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2() != 0:
            return {}
    except (OSError, AttributeError):
        return {}
    counters = {}
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return {}
        for index in range(count.value):
            device, energy = ctypes.c_void_p(), ctypes.c_ulonglong()
            uuid = ctypes.create_string_buffer(_UUID_LENGTH)
            if (
                nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0
                and nvml.nvmlDeviceGetUUID(device, uuid, _UUID_LENGTH) == 0
                and nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(energy)) == 0
            ):
                counters[uuid.value.decode().removeprefix(_PREFIX)] = energy.value
    finally:
        nvml.nvmlShutdown()
    return counters


def _used_gpu() -> str | None:
    """UUID of the GPU that this process trains on; None if it trains on the CPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    device = torch.cuda.current_device()
    return str(torch.cuda.get_device_properties(device).uuid).removeprefix(_PREFIX)
