"""Two processes that find each other as the ranks of a run do, and exchange a number: does that work here?

    python -m stages.handshake RANK FOLDER here|apart

`here`: both are on one machine; `apart`: each is on one of its own, and both see the folder. Rank 0 prints,
as JSON, what torch is and sees, and how the exchange went over gloo, and over NCCL where each has a GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from stages.config import SiteConfig
from stages.process import Process, connected

_SECONDS = 30.0
_RANKS = 2
_RANKS_A_MACHINE = {"here": 2, "apart": 1}


def main() -> None:
    """One of the two processes."""
    rank, folder, local_size = int(sys.argv[1]), Path(sys.argv[2]), _RANKS_A_MACHINE[sys.argv[3]]
    found = what_torch_sees()
    found["gloo"] = _exchanged(rank, folder / "gloo", device="cpu", local_size=local_size)
    if len(found["gpus"]) >= local_size:
        found["nccl"] = _exchanged(rank, folder / "nccl", device="cuda", local_size=local_size)
    if rank == 0:
        print(json.dumps(found))


def what_torch_sees() -> dict[str, Any]:
    """Versions, and each GPU's name and bytes of memory."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl_version": _nccl() if gpus else None,
        "gpus": [
            {"name": properties.name, "memory": properties.total_memory}
            for properties in map(torch.cuda.get_device_properties, gpus)
        ],
    }


def _nccl() -> str:
    from torch.cuda import nccl

    version: tuple[int, ...] = nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def _exchanged(rank: int, folder: Path, *, device: str, local_size: int) -> str:
    """What went wrong; empty if nothing did."""
    site = SiteConfig(device=device, timeout=_SECONDS, start_timeout=_SECONDS)
    try:
        with connected(
            rank=rank,
            size=_RANKS,
            local_rank=rank % local_size,
            local_size=local_size,
            rendezvous=folder,
            site=site,
        ) as process:
            received = _exchange(process)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return "" if received == [0.0, 1.0] else f"the ranks received {received}"


def _exchange(process: Process) -> list[float]:
    """The numbers of all ranks, each of which sends its own."""
    ranks = list(range(process.size))
    mine = torch.full((1,), float(process.rank), device=process.device)
    everyone = [torch.full_like(mine, -1.0) for _ in ranks]
    process.communicator("handshake", ranks).allgather([everyone], [mine]).wait()
    return [float(one) for one in everyone]


if __name__ == "__main__":
    main()
