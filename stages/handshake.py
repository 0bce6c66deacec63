"""Two processes that find each other as the ranks of a run do, and exchange what they do: does it work here?

    python -m stages.handshake RANK FOLDER here|apart

`here`: both are on one machine; `apart`: each is on one of its own, and both see the folder. Rank 0 prints,
as JSON, what torch is and sees, and how the exchange went over gloo, and over NCCL where each has a GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from schedules import build
from schedules.dependencies import updated
from schedules.messages import received, sent
from stages.config import SiteConfig
from stages.connection import Connection, connect
from stages.groups import Exchange
from stages.ownership import share_out
from stages.process import Process, connected
from stages.rounds import reduction_plan

T = TypeVar("T")

_SECONDS = 30.0
_RANKS = 2
_NUMBERS = 1024
"""In a message."""
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
            return _exchange(process)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _exchange(process: Process) -> str:
    """What two ranks of a run do, with the links and groups of a run; what was wrong, empty if nothing.

    First they are two stages that send each other activations and gradients and agree on a number, then two
    data ranks that add gradients and spread weights.
    """
    return _as_stages(process) or _as_data_ranks(process)


def _connection(process: Process, *, stages: int) -> Connection:
    return connect(
        process,
        rank_of_stage=range(stages),
        data_ranks=process.size // stages,
        shape=(_NUMBERS,),
        dtype=torch.float32,
        common_step=True,
    )


def _as_stages(process: Process) -> str:
    connection = _connection(process, stages=process.size)
    links = connection.links
    program = build("1f1b", stages=process.size, microbatches=4, steps=1)
    links.connect()
    links.begin(program)
    for number, action in enumerate(program.actions[connection.rank]):
        links.passed(updated(number))
        if (incoming := received(action, program.num_stages)) is not None:
            tensor = links.receive(incoming)
            if bool((tensor != incoming.microbatch).any()):
                return f"micro-batch {incoming.microbatch} came as {tensor[0]:g}"
            links.release(tensor)
        if (outgoing := sent(action, program.num_stages)) is not None:
            links.send(outgoing, torch.full((_NUMBERS,), float(action.microbatch), device=process.device))
    links.finish()
    ranks = [float(of_rank) for of_rank in _had(connection.pipeline.share(_numbers(process, 1)))]
    return "" if ranks == [0.0, 1.0] else f"the ranks agreed on {ranks}"


def _as_data_ranks(process: Process) -> str:
    connection = _connection(process, stages=1)
    sizes = [_NUMBERS, _NUMBERS]
    ownership = share_out(sizes, data_ranks=process.size)
    plan = reduction_plan(sizes, ownership, number_bytes=4)
    flat = _numbers(process, sum(sizes)) + 1
    reduction = connection.data.reduce(flat, plan, early=False)
    reduction.advance(len(sizes))
    _had(reduction)
    _had(connection.data.spread(flat, ownership.bounds))
    if bool((flat == 3).all()):  # 1 of one rank and 2 of the other
        return ""
    return f"gradients of 1 and 2 were added to {flat[0]:g} and {flat[-1]:g}"


def _numbers(process: Process, count: int) -> Tensor:
    """This rank's number, `count` times."""
    return torch.full((count,), float(process.rank), device=process.device)


def _had(exchange: Exchange[T]) -> T:
    exchange.wait()
    return exchange.take()


if __name__ == "__main__":
    main()
