"""Training under NCCL's rules, over gloo: it ends, with the rows of replay, bit for bit.

A communicator is one queue: its operations run one at a time, in the order in which they were begun. The
first operation of a kind with a peer blocks the host until the peer has begun its own.
"""

from __future__ import annotations

import datetime
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.small_runs import in_processes, replayed, small_config
from support.training_cases import check_processes_are_replays, of_every_schedule, train_here
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from stages.comm.communicator import Communicator, Work
from stages.comm.process import Process
from stages.config.run_config import RunConfig
from stages.config.segments import schedule_facts

pytestmark = pytest.mark.slow

WAIT = 60.0
"""Seconds after which an operation counts as hung."""


class _QueuedWork:
    def __init__(self, description: str) -> None:
        self._description = description
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self, begin: Callable[[], Work]) -> None:
        """Perform the operation, in the communicator's thread."""
        try:
            begin().wait()
        except BaseException as error:
            self._error = error
        self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self) -> object:
        if not self._over.wait(WAIT):
            raise TimeoutError(f"{self._description}: never completed")
        if self._error is not None:
            raise self._error
        return None


class LikeNccl:
    """A communicator with NCCL's order of operations.

    Args:
        gloo: communicator that performs the operations.
        store: store that only its members use.
        name: name in error messages.
        rank: rank of this process in the communicator.
        size: number of members.
        connecting: whether the first operation of a kind with a peer blocks the host.
        late: delay of every collective, in seconds.
        begun: receives the name and kind of each operation.
    """

    def __init__(
        self,
        gloo: Communicator,
        store: Store,
        *,
        name: str,
        rank: int,
        size: int,
        connecting: bool,
        late: float,
        begun: list[str],
    ) -> None:
        self._begun = begun
        self._gloo = gloo
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size
        self._connecting = connecting
        self._late = late
        self._connected: set[str] = set()
        self._queue: queue.Queue[tuple[Callable[[], Work], _QueuedWork] | None] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (item := self._queue.get()) is not None:
            begin, work = item
            work.run(begin)

    def _begin(self, kind: str, peer_kind: str, peers: Sequence[int], begin: Callable[[], Work]) -> Work:
        if self._connecting and kind not in self._connected:
            self._connected.add(kind)
            self._store.set(f"{self._rank} {kind}", "begun")
            try:
                self._store.wait([f"{peer} {peer_kind}" for peer in peers], datetime.timedelta(seconds=WAIT))
            except Exception as error:
                raise TimeoutError(f"{self._name}: the host waits in its first {kind}") from error
        self._begun.append(f"{self._name}: {kind}")
        work = _QueuedWork(f"{self._name}: {kind}")
        self._queue.put((begin, work))
        return work

    def _together(self, kind: str, begin: Callable[[], Work]) -> Work:
        def begin_late() -> Work:
            time.sleep(self._late)
            return begin()

        others = [rank for rank in range(self._size) if rank != self._rank]
        return self._begin(kind, kind, others, begin_late)

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Work:
        kinds = f"send to {to}", f"recv from {self._rank}"
        return self._begin(*kinds, [to], lambda: self._gloo.send(tensors, to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Work:
        kinds = f"recv from {source}", f"send to {self._rank}"
        return self._begin(*kinds, [source], lambda: self._gloo.recv(tensors, source, tag))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Work:
        return self._together("allgather", lambda: self._gloo.allgather(outputs, inputs))

    def _allgather_base(self, output: Tensor, given: Tensor, /) -> Work:
        return self._together("allgather_base", lambda: self._gloo._allgather_base(output, given))

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        return self._together(f"broadcast from {root}", lambda: self._gloo.broadcast(tensor, root))

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], given_sizes: list[int], /
    ) -> Work:
        return self._together(
            "alltoall", lambda: self._gloo.alltoall_base(output, given, output_sizes, given_sizes)
        )


@contextmanager
def nccl_rules(
    *, connecting: bool = True, late: Callable[[str], float] = lambda name: 0.0
) -> Iterator[list[str]]:
    """Within the block, processes create communicators that keep NCCL's rules; yields what is begun on which.

    Args:
        connecting: whether the first operation of a kind with a peer blocks the host.
        late: delay of a communicator's collectives in seconds, from its name.
    """
    plain: Any = Process._communicator
    created: list[LikeNccl] = []
    begun: list[str] = []

    def communicator(self: Process, name: str, ranks: Sequence[int], *, link: bool) -> Communicator:
        like = LikeNccl(
            plain(self, name, ranks, link=link),
            PrefixStore(f"like NCCL {name}", self.store),
            name=name,
            rank=list(ranks).index(self.rank),
            size=len(ranks),
            connecting=connecting,
            late=late(name),
            begun=begun,
        )
        created.append(like)
        return like

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Process, "_communicator", communicator)
        yield begun
    for like in created:
        like.close()


def train_like_nccl(process: Process, config: RunConfig) -> list[dict[str, Any]]:
    """With late sums of one stage's gradients: the first stage's where steps are synchronous."""
    late_stage = int(not schedule_facts(config).synchronous)

    def late(name: str) -> float:
        # A group of data ranks is called "GENERATION data RANK".
        found = re.search(r"data (\d+)$", name)
        return 0.02 if found is not None and int(found[1]) == late_stage else 0.0

    with nccl_rules(late=late):
        return train_here(process, config)


def with_shards(stages: int) -> list[RunConfig]:
    settings: dict[str, Any] = {"stages": stages, "microbatches": 2 * stages, "steps": 2, "shard_head": True}
    return [
        *(small_config(name, **settings) for name in ("1f1b", "2bw", "2bw-v", "zb-v", "v-half")),
        *(small_config(name, family="tied", **settings) for name in ("1f1b", "zb-v")),
    ]


def test_every_schedule_and_shards_of_the_head_train() -> None:
    configs = [*of_every_schedule(microbatches=4, steps=2), *with_shards(2)]
    check_processes_are_replays(configs, size=2, train=train_like_nccl)


def digest_like_nccl(process: Process, config: RunConfig) -> tuple[str | None, list[str]]:
    """With late gathers: of the weights, in the process that writes rows; and the exchanges in the order in
    which they were begun, with the kinds of their communicators."""
    with nccl_rules(late=lambda name: 0.01 * ("shards" in name)) as begun:
        rows = train_here(process, config)
    # The members' number ends the name.
    begun = [re.sub(r" \d+:", ":", words) for words in begun]
    return str(rows[-1]["weights_sha256"]) if rows else None, begun


def test_models_in_shards_train() -> None:
    """Of `hsdp` only that it ends: it adds gradients within groups first."""
    settings: dict[str, Any] = {
        "stages": 4,
        "microbatches": 4,
        "steps": 2,
        "optimizer": "muon",
        "clip": "none",
    }
    configs = [small_config(name, vocab_size=320, **settings) for name in ("fsdp", "hsdp")]
    by_rank = in_processes(digest_like_nccl, configs, size=4)
    assert by_rank[0][0][0] == replayed(configs[0]).digest
    for number, kinds in enumerate(
        (("data", "shards", "matrices"), ("data", "shards", "replicas", "matrices"))
    ):
        orders = [found[number][1] for found in by_rank]
        # All processes begin the same exchanges in the same order: no number of queues or streams can hang.
        assert orders == [orders[0]] * 4
        communicators = {words.partition(":")[0] for words in orders[0]}
        assert len(communicators) == len(kinds)
        assert all(any(kind in name for name in communicators) for kind in kinds)


def test_three_shards_of_the_head_train() -> None:
    check_processes_are_replays(with_shards(3), size=3, train=train_like_nccl)


def test_data_ranks_train_whose_reductions_are_late() -> None:
    configs = [
        small_config("1f1b", data=2, microbatches=4, steps=2, optimizer="muon"),
        small_config("2bw", data=2, microbatches=4, steps=2, optimizer="muon", coefficient=1.0),
    ]
    check_processes_are_replays(configs, size=4, train=train_like_nccl)
