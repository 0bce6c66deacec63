"""What a stage holds in memory, counted from the tensors themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stages.assemble import Rank, dtypes
from stages.blocks import block_runner
from stages.config import RunConfig
from stages.memory import StageMemory, sizes
from stages.model import Stage, next_token_loss
from stages.split_backward import DeferredGradients, deferring
from stages.update import StageState

KINDS = tuple(kind.name for kind in fields(StageMemory))


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What torch's allocator had of a GPU in a segment, for whatever purpose."""

    peak: int
    """The most bytes in use at once."""
    reserved: int
    """The most that it had taken from the device at once, in use or not."""
    retries: int
    """Times it found no room, gave back all that was not in use and tried again: each holds up the device."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What one rank held at its peak in a segment, in bytes."""

    rank: int
    stages: dict[int, dict[str, int]]
    """For each of its stages, bytes by kind; the kinds are those of `stages.memory.StageMemory`."""
    in_flight: dict[int, int]
    """For each of its stages, the most micro-batches in flight."""
    versions: dict[int, int]
    """For each of its stages, how many weight versions it has room for."""
    messages: int
    """Buffers for what neighbours send, but for those that a micro-batch in flight has as its input."""
    reduction: int
    """Buffers in which gradients are exchanged with other data ranks."""
    device: DeviceMemory | None
    """What torch's allocator says; None on a CPU."""

    @property
    def total(self) -> int:
        return (
            self.messages
            + self.reduction
            + sum(size for kinds in self.stages.values() for size in kinds.values())
        )


def memory_fields(of_ranks: Sequence[RankMemory]) -> dict[str, Any]:
    """What the ranks held, as the metrics have it: lists by stage; `messages`, `reduction`, `total` and what
    begins with `device_` by rank. Of data ranks, the one that holds most."""
    holders: dict[int, RankMemory] = {}
    ranks: dict[int, RankMemory] = {}
    for one in of_ranks:
        if one.rank not in ranks or one.total > ranks[one.rank].total:
            ranks[one.rank] = one
        for stage, kinds in one.stages.items():
            if stage not in holders or sum(kinds.values()) > sum(holders[stage].stages[stage].values()):
                holders[stage] = one
    stages, in_order = sorted(holders), [ranks[number] for number in sorted(ranks)]
    devices = [(one.rank, one.device) for one in of_ranks if one.device is not None]

    def of_device(kind: str) -> list[int]:
        numbers = sorted({rank for rank, _ in devices})
        return [max(getattr(of, kind) for rank, of in devices if rank == number) for number in numbers]

    return {
        **{kind: [holders[stage].stages[stage][kind] for stage in stages] for kind in KINDS},
        "in_flight": [holders[stage].in_flight[stage] for stage in stages],
        "versions": [holders[stage].versions[stage] for stage in stages],
        "messages": [rank.messages for rank in in_order],
        "reduction": [rank.reduction for rank in in_order],
        "total": [rank.total for rank in in_order],
        "device_peak": of_device("peak"),
        "device_reserved": of_device("reserved"),
        "device_retries": of_device("retries"),
    }


class Weigher:
    """Weighs the ranks of a process at drains.

    What a micro-batch keeps is measured once, by a forward that serves nothing else, with hooks on what
    autograd saves; training itself has none. All micro-batches of a stage keep the same, so the peak of a
    segment is that times the most that were in flight.
    """

    def __init__(self, config: RunConfig, *, rank_of_stage: Sequence[int], device: torch.device) -> None:
        self._config = config
        self._rank_of_stage = rank_of_stage
        self._device = device
        self._of_microbatch: dict[int, tuple[int, int, int]] = {}
        self._retries = 0

    def begin(self) -> None:
        """A segment begins."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._retries = self._retries_so_far()

    def _retries_so_far(self) -> int:
        return int(torch.cuda.memory_stats(self._device)["num_alloc_retries"])

    def _device_memory(self) -> DeviceMemory | None:
        if self._device.type != "cuda":
            return None
        return DeviceMemory(
            peak=torch.cuda.max_memory_allocated(self._device),
            reserved=torch.cuda.max_memory_reserved(self._device),
            retries=self._retries_so_far() - self._retries,
        )

    def weigh(self, rank: Rank) -> RankMemory:
        """What a rank held in the segment that has ended."""
        device = self._device_memory()
        in_flight = rank.executor.in_flight
        from_others = sum(
            max(wholes for wholes, _ in in_flight[stage])
            for stage in rank.stages
            if stage > 0 and self._rank_of_stage[stage - 1] != rank.number
        )
        train, model = self._config.train, self._config.model
        buffer = train.microbatch_size * self._config.data.context * model.width * sizes(self._config).replica
        return RankMemory(
            rank=rank.number,
            stages={
                stage: self._of_stage(stage, state, in_flight[stage]) for stage, state in rank.stages.items()
            },
            in_flight={stage: max(map(sum, counts)) for stage, counts in in_flight.items()},
            versions={stage: len(state.weights.replicas) for stage, state in rank.stages.items()},
            messages=max(0, rank.connection.links.most_buffers - from_others) * buffer,
            reduction=rank.connection.data.room_bytes,
            device=device,
        )

    def _of_stage(
        self, stage: int, state: StageState, in_flight: Collection[tuple[int, int]]
    ) -> dict[str, int]:
        weights = state.weights
        if stage not in self._of_microbatch:
            self._of_microbatch[stage] = self._measure(state, split=any(half for _, half in in_flight))
        whole, half, recomputed = self._of_microbatch[stage]
        replicas = [tensor for replica in weights.replicas for tensor in replica.parameters]
        master = list(weights.master.parameters)
        gradients = [buffer.flat for buffer in weights.gradients]
        moments = [
            tensor
            for kept in (state.update.optimizer.state.values() if state.update.optimizer is not None else ())
            for tensor in kept.values()
            if isinstance(tensor, Tensor) and tensor.ndim > 0  # step counters, a number each, are left out
        ]
        counted = _pointers([*replicas, *master, *gradients, *moments])
        return {
            "weights": _bytes(replicas),
            "master": _bytes(master),
            "gradients": _bytes(gradients),
            "optimizer": _bytes(moments),
            "correction": _bytes(_tensors_in(state.update.correction), without=counted),
            "activations": max(wholes * whole + halves * half for wholes, halves in in_flight),
            "recomputed": recomputed,
        }

    def _measure(self, state: StageState, *, split: bool) -> tuple[int, int, int]:
        """Bytes kept of one micro-batch until its backward, from its first half to its second, and made anew
        within a backward."""
        train = self._config.train
        replica = state.weights.newest()
        module = replica.module
        permanent = [*replica.parameters, *module.buffers()]
        if module.rotation is not None:
            permanent.append(module.rotation)
        tokens = torch.zeros(
            (train.microbatch_size, self._config.data.context), dtype=torch.long, device=self._device
        )
        activation = torch.zeros(
            (*tokens.shape, self._config.model.width), dtype=dtypes(self._config).replica, device=self._device
        ).requires_grad_()
        given = activation if module.embedding is None else tokens
        deferred = DeferredGradients() if split else None
        saved: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with leaving_no_trace(module, self._device), torch.enable_grad(), deferring(deferred):
            with saved_tensors_hooks(keep, _same):
                output = module(given)
                if module.head is not None:
                    output = next_token_loss(output, tokens.clone()) / 1
                whole = _bytes([*saved, given, output], without=_pointers(permanent))
                saved.clear()
                if train.recompute:
                    run_block = block_runner(self._config.model, recompute=False, compiled=train.compile)
                    run_block(next(iter(module.blocks.values())), activation, module.rotation)
                recomputed = _bytes(saved, without=_pointers(permanent))
            if deferred is None:
                return whole, 0, recomputed
            start = given if given.requires_grad else replica.parameters[0]
            torch.autograd.grad(output, start, torch.zeros_like(output))
            return whole, _bytes(deferred.kept(), without=_pointers(permanent)), recomputed


@contextmanager
def leaving_no_trace(module: Stage, device: torch.device) -> Iterator[None]:
    """Put back what a model of the user's own may change in a forward: its buffers, and the random state."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    for buffer, before in buffers:
        buffer.copy_(before)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _pointers(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _bytes(tensors: Iterable[Tensor], *, without: Collection[int] = ()) -> int:
    """Of all memory that the tensors lie in, each piece once."""
    storages = {
        storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    return sum(size for pointer, size in storages.items() if pointer not in without)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors that an object keeps in its attributes, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors_in(part)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            yield from _tensors_in(part)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _tensors_in(vars(value))
