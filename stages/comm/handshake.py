"""Checks that two processes can connect and exchange messages as the ranks of a run do.

    python -m stages.comm.handshake RANK FOLDER here|apart

`here`: both on one machine; `apart`: on two machines that share the folder. Rank 0 prints as JSON the
versions and GPUs that torch reports, and the result over gloo, and over NCCL where each process has a GPU:
the error, or empty (`gloo`), the rate in one direction in 10^9 bytes per second (`gloo_rate`), and how NCCL
moves what is sent (`nccl_transport`).
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stages.config.torch_process import importing_torch, leave

with importing_torch():
    import torch
    from torch import Tensor

    from schedules import Program, build
    from schedules.dependencies import updated
    from schedules.messages import received, sent
    from stages.comm.device_settings import set_environment
    from stages.comm.process import Process, connected
    from stages.comm.reduction_rounds import reduction_plan
    from stages.comm.topology import Connection, connect
    from stages.config.run_config import SiteConfig
    from stages.shape.optimizer_sharding import assign_owners

_SECONDS = 30.0
_RANKS = 2
_NUMBERS = 1024
"""Entries of a message."""
_RANKS_PER_MACHINE = {"here": 2, "apart": 1}
_LARGE = 2**24
"""Entries of the messages whose rate is measured: 64 MiB each, as those of a 10B model."""
_REPEATS = 4
_NCCL_LOG = "nccl-log"


def main() -> None:
    """One of the two processes."""
    rank, folder, local_size = int(sys.argv[1]), Path(sys.argv[2]), _RANKS_PER_MACHINE[sys.argv[3]]
    set_environment()  # before CUDA starts
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{_NCCL_LOG}-{rank}"
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    os.environ.setdefault("NCCL_DEBUG_FILE", str(log))
    result = torch_info()
    result |= _connect_and_exchange(rank, folder / "gloo", kind="gloo", local_size=local_size)
    if len(result["gpus"]) >= local_size:
        result |= _connect_and_exchange(rank, folder / "nccl", kind="nccl", local_size=local_size)
        if log.exists():
            result["nccl_transport"] = transport(log.read_text(errors="replace").splitlines())
    if rank == 0:
        print(json.dumps(result))


def torch_info() -> dict[str, Any]:
    """Versions, and name and memory in bytes of each GPU."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl_version": _nccl_version() if gpus else None,
        "gpus": [
            {"name": properties.name, "memory": properties.total_memory}
            for properties in map(torch.cuda.get_device_properties, gpus)
        ],
    }


def _nccl_version() -> str:
    from torch.cuda import nccl

    version: tuple[int, ...] = nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def transport(log: Iterable[str]) -> str:
    """How NCCL moves messages between two ranks, by its log: `P2P`, `SHM`, `NET/IB`, `NET/Socket` or several;
    empty if it does not say."""
    found = dict.fromkeys(
        "/".join(words[:2]) if words[0] == "NET" else words[0]
        for line in log
        if (named := re.search(r"Channel .* via ([\w/]+)", line))
        for words in [named[1].split("/")]
    )
    return ", ".join(found)


def _connect_and_exchange(rank: int, folder: Path, *, kind: str, local_size: int) -> dict[str, Any]:
    """By `kind` the error, empty if there was none; then the rate, too."""
    device = {"gloo": "cpu", "nccl": "cuda"}[kind]
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
            problem = _exchange(process)
            return {kind: problem} | ({} if problem else {f"{kind}_rate": _rate(process)})
    except Exception as error:
        return {kind: " ".join(f"{type(error).__name__}: {error}".split())[:300]}


def _rate(process: Process) -> float:
    """10^9 bytes per second from one process to the other, over one link; measured by the sender."""
    there, back = (process.link(f"rate {ranks}", ranks) for ranks in ([0, 1], [1, 0]))
    message, answer = (torch.zeros(size, device=process.device) for size in (_LARGE, 1))
    started = 0.0
    for number in range(1 + _REPEATS):  # the first one connects
        if number == 1:
            started = time.perf_counter()
        if process.rank == 0:
            there.send([message], 1, 0).wait()
            back.recv([answer], 0, 0).wait()
        else:
            there.recv([message], 0, 0).wait()
            back.send([answer], 1, 0).wait()
        answer.tolist()  # until the device has it
    seconds = time.perf_counter() - started
    return round(_REPEATS * message.nbytes / seconds / 1e9, 3)


def _exchange(process: Process) -> str:
    """Exchange messages with the links and groups of a run; returns the error, empty if there was none.

    The two processes are first two stages, which send activations and gradients and gather a number, then two
    data ranks, which reduce gradients and broadcast weights.
    """
    return _as_stages(process) or _as_data_ranks(process)


def _connection(process: Process, program: Program) -> Connection:
    return connect(process, program, shape=(_NUMBERS,), dtype=torch.float32, common_step=True)


def _as_stages(process: Process) -> str:
    program = build("1f1b", stages=process.size, microbatches=4, steps=1)
    connection = _connection(process, program)
    links = connection.links
    links.connect()
    links.begin(program)
    for number, action in enumerate(program.actions[connection.rank]):
        links.passed(updated(number))
        for incoming in received(action, program):
            tensor = links.receive(incoming)
            if bool((tensor != incoming.microbatch).any()):
                return f"micro-batch {incoming.microbatch} arrived as {tensor[0]:g}"
        for outgoing in sent(action, program):
            links.send(outgoing, torch.full((_NUMBERS,), float(action.microbatch), device=process.device))
    links.finish()
    ranks = [float(rank) for rank in connection.pipeline.all_gather(_filled(process, 1)).complete()]
    return "" if ranks == [0.0, 1.0] else f"the ranks gathered {ranks}"


def _as_data_ranks(process: Process) -> str:
    connection = _connection(process, build("1f1b", stages=1, microbatches=1, steps=1))
    sizes = [_NUMBERS, _NUMBERS]
    ownership = assign_owners([(size,) for size in sizes], data_ranks=process.size)
    plan = reduction_plan(sizes, ownership, number_bytes=4)
    flat = _filled(process, sum(sizes)) + 1
    reduction = connection.data.reduce_scatter(flat, plan, early=False)
    reduction.advance(len(sizes))
    reduction.complete()
    connection.data.broadcast(flat, ownership.runs).complete()
    if bool((flat == 3).all()):  # 1 of one rank and 2 of the other
        return ""
    return f"gradients of 1 and 2 were added to {flat[0]:g} and {flat[-1]:g}"


def _filled(process: Process, count: int) -> Tensor:
    """A tensor of `count` entries, each this process's rank."""
    return torch.full((count,), float(process.rank), device=process.device)


if __name__ == "__main__":
    main()
    leave(0)
