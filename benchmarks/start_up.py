"""Counts what it costs to start and supervise a run, by number of ranks: connections, messages, files.

    python benchmarks/start_up.py --ranks 4 16 64 --out benchmarks/results

Rendezvous: each rank is a process, forked from one that has imported torch. The ranks connect as those of a
run do, use every group once, and meet once as at a drain. Files: the supervisors of all ranks act one after
another in this process, which counts what each opens. There is no model, and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, ClassVar

import torch
from dated import write_dated

from asyncpp_cli.launch.supervisor import _Supervisor
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.claims import check_current, claim, record_processes
from asyncpp_cli.runs.attempts.settle import end_rank
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State
from stages.comm import process as process_module
from stages.comm.collectives import Exchange, Group
from stages.comm.process import connected
from stages.comm.rendezvous.hub import Hub
from stages.comm.topology import connect
from stages.config import SiteConfig
from stages.update.optimizer_sharding import assign_owners
from stages.update.reduction_rounds import reduction_plan

NUMBERS = 1000
"""Entries of each message and of each data rank's part of the gradient."""
EXTRAPOLATED_RANKS = 4096
TIMEOUT = 300.0
"""Seconds; far above what a loaded machine needs."""

ROWS = {
    "data_ranks": "data-parallel ranks",
    "sockets_rank_0": "TCP connections of rank 0 after the rendezvous",
    "sockets_other": "of any other rank, at most",
    "sockets_used": "of any other rank with all links and groups used, at most",
    "messages_per_rank": "messages to the hub per rank, at most",
    "messages": "messages to the hub, all ranks",
    "kilobytes_per_rank": "kilobytes from the hub per rank, at most",
    "files_start": "files opened per rank at its start, at most",
    "status_writes": "times that status.json is written during the start",
    "files_look": "files opened by a supervisor per look at the run, at most",
    "files_end": "files opened per rank at its end, at most, but for the last rank",
    "files_last": "files opened by the last rank at its end",
    "files_in_attempt": "files in the attempt's folder",
    "status_bytes": "bytes of status.json",
}


class CountingHub(Hub):
    """Counts the bytes sent to each rank."""

    sent: ClassVar[Counter[int]] = Counter()

    def _send(self, peer: Any, content: bytes) -> None:
        if peer.rank is not None:
            CountingHub.sent[peer.rank] += len(content)
        super()._send(peer, content)


class FileCounter:
    """Counts the files and folders below `folder` that this process opens, and the writes of status.json."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self.opened = 0
        self.status_writes = 0
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            self.opened += str(arguments[0]).startswith(self._folder)
        elif event == "os.rename":
            self.status_writes += str(arguments[1]) == f"{self._folder}/status.json"

    def count(self, work: Callable[[], object]) -> int:
        """Files that `work` opens."""
        before = self.opened
        work()
        return self.opened - before


def tcp_connections() -> int:
    """Established TCP connections of this process."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(str(descriptor.readlink()))
        except OSError:
            continue
    columns = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(fields[3] == "01" and f"socket:[{fields[9]}]" in own for fields in columns)


def rendezvous_of_rank(folder: Path, rank: int, ranks: int, stages: int) -> dict[str, Any]:
    """Connect as one rank, use every link and group, meet once; what was counted."""
    torch.set_num_threads(1)
    process_module.Hub = CountingHub  # type: ignore[misc]
    with connected(
        rank=rank,
        size=ranks,
        local_rank=rank,
        local_size=ranks,
        rendezvous=folder / "rendezvous",
        site=SiteConfig(device="cpu", timeout=TIMEOUT, start_timeout=TIMEOUT),
    ) as process:
        process.gather(None, to=0)
        met = tcp_connections()
        process.gather(None, to=0)
        connection = connect(
            process,
            rank_of_stage=range(stages),
            data_ranks=ranks // stages,
            shape=(NUMBERS,),
            dtype=torch.float32,
            common_step=True,
        )
        connection.links.connect()
        for group in (connection.pipeline, connection.data):
            use(group)
        process.gather(None, to=0)
        used = tcp_connections()
        process.gather(None, to=0)
        return {
            "met": met,
            "used": used,
            "messages": process.member.requests,
            "bytes_sent": dict(CountingHub.sent),
        }


def use(group: Group) -> None:
    """Every collective that training performs in a group."""

    def take(exchange: Exchange[Any]) -> None:
        exchange.wait()
        exchange.take()

    if group.size == 1:
        return
    take(group.all_gather(torch.zeros(1)))
    ownership = assign_owners([(NUMBERS,)] * group.size, data_ranks=group.size)
    plan = reduction_plan([NUMBERS] * group.size, ownership, number_bytes=4)
    flat = torch.zeros(NUMBERS * group.size)
    reduction = group.reduce_scatter(flat, plan, early=False)
    reduction.advance(group.size)
    take(reduction)
    take(group.broadcast(flat, ownership.runs))


def in_processes(ranks: int, work: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """What `work` returns for each rank, each in a forked process.

    Raises:
        RuntimeError: it failed in one of them.
    """
    context = multiprocessing.get_context("fork")
    processes = []
    for rank in range(ranks):
        receiving, sending = context.Pipe(duplex=False)

        def send_result(sending: Pipe = sending, rank: int = rank) -> None:
            sending.send(work(rank))

        process = context.Process(target=send_result)
        process.start()
        sending.close()
        processes.append((process, receiving))
    results = []
    for rank, (process, receiving) in enumerate(processes):
        try:
            results.append(receiving.recv())
        except EOFError:
            raise RuntimeError(f"rank {rank} failed") from None
        process.join()
    return results


def count_rendezvous(ranks: int, *, stages: int) -> dict[str, int]:
    """Connections and messages of `ranks` processes, `stages` of them in each pipeline."""
    with tempfile.TemporaryDirectory() as folder:
        by_rank = in_processes(ranks, lambda rank: rendezvous_of_rank(Path(folder), rank, ranks, stages))
    first, *others = by_rank
    return {
        "data_ranks": ranks // stages,
        "sockets_rank_0": first["met"],
        "sockets_other": max(rank["met"] for rank in others),
        "sockets_used": max(rank["used"] for rank in others),
        "messages_per_rank": max(rank["messages"] for rank in by_rank),
        "messages": sum(rank["messages"] for rank in by_rank),
        "kilobytes_per_rank": -(-max(first["bytes_sent"].values()) // 1000),
    }


def count_files(ranks: int) -> dict[str, int]:
    """Files that the supervisors and ranks of one attempt open, from the claim to the settled status."""
    with tempfile.TemporaryDirectory() as temporary:
        run = Run(Path(temporary) / "run")
        run.folder.mkdir()
        counter = FileCounter(run.folder)
        attempt = claim(run, processes=ranks, replay=False, steps=0)
        assert attempt is not None
        starts = [counter.count(lambda rank=rank: start(attempt, rank)) for rank in range(ranks)]
        # Rank 0 knows all processes once they have met.
        starts[0] += counter.count(lambda: record_processes(attempt, [this_process().pid] * ranks))
        status_writes = counter.status_writes
        looks = [counter.count(lambda rank=rank: look(attempt, rank, ranks)) for rank in range(ranks)]
        status_bytes = run.status_file.stat().st_size
        files_in_attempt = sum(1 for _ in attempt.folder.iterdir())
        ends = [
            counter.count(
                lambda rank=rank: end_rank(attempt, rank, code=0, signal_number=None, stopped=False)
            )
            for rank in range(ranks)
        ]
        assert run.status().state != State.RUNNING
    return {
        "files_start": max(starts),
        "status_writes": status_writes,
        "files_look": max(looks),
        "files_end": max(ends[:-1]),
        "files_last": ends[-1],
        "files_in_attempt": files_in_attempt,
        "status_bytes": status_bytes,
    }


def start(attempt: Attempt, rank: int) -> None:
    """What a rank's supervisor and its training process do with the run's files at their start."""
    attempt.record_start(rank, this_process(), this_process())
    check_current(attempt)


def look(attempt: Attempt, rank: int, ranks: int) -> None:
    """One look of a rank's supervisor at the run: at the request to stop and at the other ranks."""
    supervisor = _Supervisor(
        attempt, rank=rank, size=ranks, local_rank=rank, local_size=ranks, grace=60.0, received=[]
    )
    assert supervisor._seconds_left() is None


def table(results: list[dict[str, int]]) -> str:
    """The counts as a Markdown table; with two or more sizes the largest two are extrapolated linearly."""
    sizes = [str(result["ranks"]) for result in results]
    if len(results) > 1:
        sizes.append(f"{EXTRAPOLATED_RANKS} (extrapolated)")
    lines = [f"| | {' | '.join(sizes)} |", "|---|" + "---:|" * len(sizes)]
    for key, label in ROWS.items():
        counts = [f"{result[key]:,}" for result in results]
        if len(results) > 1:
            counts.append(f"{extrapolate(results[-2], results[-1], key):,}")
        lines.append(f"| {label} | {' | '.join(counts)} |")
    return "\n".join(lines)


def extrapolate(smaller: dict[str, int], larger: dict[str, int], key: str) -> int:
    slope = (larger[key] - smaller[key]) / (larger["ranks"] - smaller["ranks"])
    return round(larger[key] + slope * (EXTRAPOLATED_RANKS - larger["ranks"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64], help="multiples of --stages")
    parser.add_argument("--stages", type=int, default=4, help="ranks of a pipeline (default: 4)")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.add_argument("--out", type=Path, help="folder for a dated result")
    options = parser.parse_args()
    results = [
        {"ranks": ranks} | count_rendezvous(ranks, stages=options.stages) | count_files(ranks)
        for ranks in options.ranks
    ]
    print(json.dumps(results) if options.json else table(results))
    if options.out is not None:
        conditions = (
            f"{options.stages} ranks per pipeline; Python {platform.python_version()}, "
            f"torch {torch.__version__} with gloo, {platform.system()} {platform.machine()}, one machine."
        )
        write_dated(
            options.out, "start-up", f"# Start-up by number of ranks\n\n{table(results)}\n\n{conditions}\n"
        )


if __name__ == "__main__":
    main()
