"""What a host waits for while a kernel runs on another stream, by setting of CUDA; what CUDA and NCCL take.

    python benchmarks/gpu_facts.py --out benchmarks/results
    python benchmarks/gpu_facts.py --device cpu --seconds 0.2

A receive that is posted ahead is such a kernel: what waits for it on the host hangs a pipeline, if its
message depends on what this host would launch next. A run does nothing of this kind within a segment; these
figures say which of its precautions are needed (`stages/comm/device_settings.py`,
`stages/pipeline/warm_up.py`).

On a CPU the kernel is a sleeping thread, for which nothing waits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from frame import conditions, parser, publish

from stages.comm.device_settings import set_environment
from stages.comm.process import connected
from stages.config.run_config import SiteConfig

SETTINGS: Mapping[str, Mapping[str, str]] = {
    "of a run": {},
    "modules loaded lazily": {"CUDA_MODULE_LOADING": "LAZY"},
    "8 hardware queues": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    "one hardware queue": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
}
CYCLES_PER_SECOND = 1.9e9
"""Of a GPU's clock, about; the kernel's own time is measured."""
WAITED = 0.5
"""Share of the kernel's time from which the host counts as having waited for it."""

Row = dict[str, Any]


class Device:
    """A device that can be kept busy."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.streams = [torch.cuda.Stream() for _ in range(2)] if kind == "cuda" else []

    def finish(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def spin(self, seconds: float) -> Callable[[], None]:
        """Begin a kernel that runs about so long; returns what waits for its end."""
        if self.kind == "cuda":
            with torch.cuda.stream(self.streams[0]):
                getattr(torch.cuda, "_sleep")(int(seconds * CYCLES_PER_SECOND))  # noqa: B009  # has no stub
            return torch.cuda.synchronize
        sleeping = threading.Thread(target=time.sleep, args=(seconds,))
        sleeping.start()
        return sleeping.join

    def pinned(self, entries: int) -> None:
        torch.empty(entries, dtype=torch.float64, pin_memory=self.kind == "cuda")

    def allocated(self, size: int) -> None:
        torch.empty(size, dtype=torch.uint8, device=self.kind)

    def new_kernel(self, function: Callable[[torch.Tensor], object]) -> None:
        function(torch.ones(1, device=self.kind))

    def behind_another_stream(self) -> None:
        """Waits for a stream that has nothing to do, while a kernel is queued behind the running one."""
        if self.kind == "cpu":
            return
        with torch.cuda.stream(self.streams[0]):
            torch.ones(1, device=self.kind).add_(1)
        with torch.cuda.stream(self.streams[1]):
            torch.ones(1, device=self.kind).add_(1)
            event = torch.cuda.Event()
            event.record()
        event.synchronize()


CASES: Mapping[str, Callable[[Device], None]] = {
    "pinned allocation, 100 MB": lambda device: device.pinned(12_345_678),
    "pinned allocation, 8 kB": lambda device: device.pinned(1001),
    "device allocation, 3 GB": lambda device: device.allocated(3 * 2**30),
    "a kernel never used before": lambda device: device.new_kernel(torch.special.erfinv),
    "norms of a list, never used before": lambda device: device.new_kernel(
        lambda x: torch._foreach_norm([x.double()])
    ),
    "another stream": Device.behind_another_stream,
}


def waits(kind: str, *, seconds: float) -> list[Row]:
    """Each case while a kernel runs."""
    device = Device(kind)
    device.spin(seconds / 100)()
    device.finish()
    rows = []
    for name, work in CASES.items():
        started = time.perf_counter()
        wait = device.spin(seconds)
        begun = time.perf_counter()
        work(device)
        of_host = time.perf_counter() - begun
        wait()
        of_kernel = time.perf_counter() - started
        rows.append(
            {
                "what": name,
                "host_seconds": round(of_host, 3),
                "kernel_seconds": round(of_kernel, 3),
                "waits": of_host > WAITED * of_kernel,
            }
        )
    return rows


def communicators(kind: str) -> list[Row]:
    """Memory and seconds of CUDA's context, and of communicators of one rank."""
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        connected(
            rank=0,
            size=1,
            local_rank=0,
            local_size=1,
            rendezvous=Path(folder),
            site=SiteConfig(device=kind),
        ) as process,
    ):
        x = torch.arange(8.0, device=process.device)
        rows.append({"what": "context, with one tensor", "MB": _taken(kind), "seconds": None})
        for name, link in (("group", False), ("second group", False), ("link", True)):
            before, started = _taken(kind), time.perf_counter()
            made = (process.link if link else process.communicator)(name, [0])
            gathered = [torch.empty_like(x)]
            made.allgather([gathered], [x]).wait()
            assert torch.equal(gathered[0], x)
            seconds, after = time.perf_counter() - started, _taken(kind)
            megabytes = None if before is None or after is None else after - before
            rows.append({"what": name, "MB": megabytes, "seconds": seconds})
    return rows


def _taken(kind: str) -> float | None:
    """MB of the device that anybody has taken."""
    if kind == "cpu":
        return None
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e6


def measure(options: argparse.Namespace) -> list[Row]:
    """All rows; the cases of each setting in a process of their own, since CUDA reads settings once."""
    rows = []
    for name, setting in SETTINGS.items():
        environment = dict(os.environ) | setting
        set_environment(environment)
        command = [sys.executable, __file__, "--one", "--device", options.device]
        ended = subprocess.run(
            [*command, "--seconds", str(options.seconds)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        rows += [{"setting": name} | row for row in json.loads(ended.stdout)]
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments.add_argument("--seconds", type=float, default=1.5, help="of the kernel")
    arguments.add_argument("--one", action="store_true", help="under this process's settings alone, as JSON")
    options = arguments.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        arguments.error("--device cuda: there is no GPU here; accepted: --device cpu")
    if options.one:
        print(json.dumps(waits(options.device, seconds=options.seconds)))
        return
    rows = [{"MB": None} | row for row in measure(options)]
    set_environment()
    columns = ("setting", "what", "host_seconds", "kernel_seconds", "waits", "MB")
    for row in communicators(options.device):
        rows.append(
            {"setting": "of a run", "host_seconds": row["seconds"], "what": row["what"], "MB": row["MB"]}
        )
    shown = [{name: row.get(name) for name in columns} for row in rows]
    publish("gpu-facts", "What a host waits for on a GPU", shown, conditions(options), options)


if __name__ == "__main__":
    main()
