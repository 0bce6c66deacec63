"""Times of NCCL's collectives, by bytes and ranks."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpp_cli.planner.costs.devices import Device

LINK_SHARE, NETWORK_SHARE = 0.8, 0.9
"""Shares of the data sheet's rate that rings of NCCL reach between GPUs of a node, and between nodes: 350 to
370 of 450 GB/s on an H100 (NVIDIA/nccl-tests issue 212, NVIDIA/nccl issue 1281), 235 of 300 on an A100
(src/graph/tuning.cc of nccl); 192 of 200 GB/s between two DGX A100 (NVIDIA/nccl issue 812)."""
BASE_US, LINK_US, NETWORK_US = 8.4, 3.4, 9.6
"""Latencies of a ring, microseconds: once, and of each of its steps within a node and between nodes (Simple
protocol; src/graph/tuning.cc of nccl)."""
HELD, COPIED = 0.2, 0.6
"""Shares of a collective's time, and of the time that its bytes would take within a node, that are lost to
what is computed beside it. NCCL's kernels hold 24 of an H100's 132 SMs meanwhile
(forums.developer.nvidia.com/t/337991); bytes pass the memory, and are copied in and out. The published speeds
in docs/plan.md fix the sum, and those over slow links among them the two parts."""
_GIGA, _MICRO = 1e9, 1e-6


@dataclass(frozen=True)
class Exchange:
    """A collective, or several one after another."""

    seconds: float = 0.0
    lost: float = 0.0
    """Seconds that what is computed beside it takes longer."""

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.seconds + other.seconds, self.lost + other.lost)


NOTHING = Exchange()


@dataclass(frozen=True, kw_only=True)
class Links:
    """What connects GPUs. Collectives of one rank take no time."""

    within: float
    """Rate of a ring within a node, bytes per second."""
    between: float
    """Rate of a GPU's adapter to other nodes, bytes per second."""
    node: int
    """GPUs of a node."""

    @staticmethod
    def of(device: Device) -> Links:
        """Those of a device, by its data sheet."""
        return Links(
            within=device.link_gbs * _GIGA * LINK_SHARE,
            between=device.network_gbs * _GIGA * NETWORK_SHARE,
            node=device.gpus_per_node,
        )

    def ring(self, size: float, ranks: int) -> Exchange:
        """An all-gather or a reduce-scatter of `size` bytes in all: n - 1 steps. What the GPUs of a node hand
        on to each other comes in through all its adapters."""
        if ranks == 1 or size == 0:
            return NOTHING
        nodes = -(-ranks // self.node)
        rate = self.within if nodes == 1 else min(self.within, self.node * self.between)
        latency = BASE_US + (ranks - nodes) * LINK_US + (nodes - 1) * NETWORK_US
        return self._exchange(latency, (ranks - 1) / ranks * size, rate)

    def all_reduce(self, size: float, nodes: int) -> Exchange:
        """An all-reduce of `size` bytes between a GPU and those in its place in other nodes:
        2 (n - 1) steps, through an adapter of each."""
        if nodes == 1 or size == 0:
            return NOTHING
        steps = 2 * (nodes - 1)
        return self._exchange(BASE_US + steps * NETWORK_US, steps / nodes * size, self.between)

    def all_to_all(self, size: float, ranks: int) -> float:
        """Seconds of an exchange in which each rank sends equal parts of `size` bytes to all, itself among
        them."""
        if ranks == 1:
            return 0.0
        away = max(0, ranks - self.node)
        near = ranks - 1 - away
        latency = BASE_US + near * LINK_US + away * NETWORK_US
        return latency * _MICRO + max(near * size / self.within, away * size / self.between) / ranks

    def _exchange(self, latency_us: float, size: float, rate: float) -> Exchange:
        seconds = latency_us * _MICRO + size / rate
        return Exchange(seconds, HELD * seconds + COPIED * size / self.within)
