"""Memory of a stage, counted from its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stages.config.run_config import RunConfig
from stages.data.batches import whole_sequences
from stages.memory.estimate import StageMemory
from stages.memory.in_flight import most_held
from stages.model.compiler import compiles_here
from stages.model.decoder import Place, Stage
from stages.model.experts import Routing
from stages.model.gradients.selective import watched_by
from stages.model.gradients.split_backward import DeferredGradients, deferring
from stages.model.head_shard import HeadShard
from stages.model.runner import block_runner
from stages.pipeline.build import Rank
from stages.pipeline.stage_pass import InputGradient, graph_input
from stages.pipeline.warm_up import leaving_no_trace
from stages.update.optimizer_step import StageState
from stages.weights.number_formats import dtypes
from stages.weights.weight_versions import WeightVersions

if TYPE_CHECKING:
    from stages.weights.sharded_weights import ShardedWeights


class SavedTensors:
    """What autograd saves, and what selective recomputation makes again."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.made_again: list[list[Tensor]] = []
        """Tensors of each cheap part that ran again, as `stages.model.gradients.selective` reports them."""

    def keep(self, tensor: Tensor) -> Tensor:
        # With its graph, which holds this hook, it would be a circle that Python's collector does not see.
        self.kept.append(tensor.detach())
        return self.kept[-1]

    def make_again(self, tensors: list[Tensor]) -> None:
        self.made_again.append(tensors)


def same(tensor: Tensor) -> Tensor:
    """The tensor: for a hook that only looks."""
    return tensor


def pointers_of(tensors: Iterable[Tensor]) -> set[int]:
    """The storages of these tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def bytes_of(tensors: Iterable[Tensor], *, without: Collection[int] = ()) -> int:
    """Bytes of the storages of these tensors, each counted once."""
    storages = {
        storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    return sum(size for pointer, size in storages.items() if pointer not in without)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in an object's attributes, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            yield from tensors_in(part)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from tensors_in(vars(value))


def _weights(module: Stage) -> Iterator[Tensor]:
    """The weights of a module where they are now: in a shard of this process, or gathered."""
    for parameter in module.parameters():
        yield parameter.to_local() if hasattr(parameter, "to_local") else parameter


KINDS = tuple(kind.name for kind in fields(StageMemory))


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of torch's allocator on a GPU in a segment."""

    peak: int
    """Peak bytes in use."""
    reserved: int
    """Peak bytes taken from the device, in use or not."""
    retries: int
    """Times it found no room, freed everything unused and tried again; each stalls the device."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Peak memory of one rank in a segment, bytes."""

    rank: int
    stages: dict[int, dict[str, int]]
    """For each of its stages, bytes by kind; the kinds are those of `stages.memory.estimate.StageMemory`."""
    in_flight: dict[int, int]
    """For each of its stages, the peak number of micro-batches in flight."""
    versions: dict[int, int]
    """For each of its stages, the number of weight versions."""
    activations: int
    """Peak bytes of activations of all its stages together, which need not hold their most at one time."""
    messages: int
    """Messages being received or sent; one that has been received belongs to its stage."""
    reduction: int
    """Buffers of the gradient exchange between data ranks."""
    device: DeviceMemory | None
    """None on a CPU."""

    @property
    def total(self) -> int:
        return (
            self.messages
            + self.reduction
            + sum(size for kinds in self.stages.values() for size in kinds.values())
        )


def memory_fields(ranks: Sequence[RankMemory]) -> dict[str, Any]:
    """The fields of a metrics row: lists by stage; `messages`, `reduction`, `total` and what begins with
    `device_` by rank. Of several data ranks, the one that holds the most counts."""
    fullest_of_stage: dict[int, RankMemory] = {}
    fullest: dict[int, RankMemory] = {}
    for memory in ranks:
        if memory.rank not in fullest or memory.total > fullest[memory.rank].total:
            fullest[memory.rank] = memory
        for stage, kinds in memory.stages.items():
            known = fullest_of_stage.get(stage)
            if known is None or sum(kinds.values()) > sum(known.stages[stage].values()):
                fullest_of_stage[stage] = memory
    by_stage = sorted(fullest_of_stage.items())
    by_rank = [fullest[number] for number in sorted(fullest)]
    devices = [(memory.rank, memory.device) for memory in ranks if memory.device is not None]

    def device_field(name: str) -> list[int]:
        numbers = sorted({rank for rank, _ in devices})
        return [
            max(getattr(device, name) for rank, device in devices if rank == number) for number in numbers
        ]

    return {
        **{kind: [memory.stages[stage][kind] for stage, memory in by_stage] for kind in KINDS},
        "in_flight": [memory.in_flight[stage] for stage, memory in by_stage],
        "versions": [memory.versions[stage] for stage, memory in by_stage],
        "rank_activations": [memory.activations for memory in by_rank],
        "messages": [memory.messages for memory in by_rank],
        "reduction": [memory.reduction for memory in by_rank],
        "total": [memory.total for memory in by_rank],
        "device_peak": device_field("peak"),
        "device_reserved": device_field("reserved"),
        "device_retries": device_field("retries"),
    }


class MemoryMeter:
    """Measures the ranks of a process at drains.

    The activations of one micro-batch are measured once, in a separate forward with hooks on what autograd
    saves; training itself has none. All micro-batches of a stage keep the same, so the peak of a segment is
    that times the peak number in flight.
    """

    def __init__(self, config: RunConfig, *, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._microbatch_bytes: dict[int, tuple[int, int, int]] = {}
        self._retries = 0

    def begin(self) -> None:
        """Reset the device's counters at the start of a segment."""
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

    def measure(self, rank: Rank) -> RankMemory:
        """Memory of a rank in the segment that has ended."""
        device = self._device_memory()
        together = rank.executor.in_flight
        in_flight = {
            stage: {counts[place] for counts in together} for place, stage in enumerate(sorted(rank.stages))
        }
        stages = {
            stage: self._stage_bytes(stage, state, in_flight[stage]) for stage, state in rank.stages.items()
        }
        sizes = [self._microbatch_bytes[stage][:2] for stage in sorted(rank.stages)]
        links = rank.connection.links
        return RankMemory(
            rank=rank.number,
            stages=stages,
            in_flight={stage: max(map(sum, counts)) for stage, counts in in_flight.items()},
            versions={stage: len(state.weights.replicas) for stage, state in rank.stages.items()},
            activations=most_held(together, sizes),
            messages=links.most_message_bytes,
            reduction=rank.connection.data.room_bytes
            + max(state.weights.room_bytes for state in rank.stages.values()),
            device=device,
        )

    def _stage_bytes(
        self, stage: int, state: StageState, in_flight: Collection[tuple[int, int]]
    ) -> dict[str, int]:
        weights = state.weights
        if stage not in self._microbatch_bytes:
            self._microbatch_bytes[stage] = self._measure_microbatch(
                state, split=any(half for _, half in in_flight)
            )
        whole, half, recomputed = self._microbatch_bytes[stage]
        replicas: list[Tensor] = []
        for replica in weights.replicas:
            replicas += [*replica.parameters, replica.biases]
        master = list(weights.master.parameters)
        gradients = [
            tensor
            for buffer in weights.gradients
            for tensor in (buffer.flat, *buffer.owned_runs, buffer.loads)
        ]
        if state.tied is not None:
            gradients.append(state.tied.gradient)
        moments = [
            tensor
            for kept in (state.update.optimizer.state.values() if state.update.optimizer is not None else ())
            for tensor in kept.values()
            if isinstance(tensor, Tensor) and tensor.ndim > 0  # step counters, a number each, are left out
        ]
        counted = pointers_of([*replicas, *master, *gradients, *moments])
        return {
            # Rows of shards that are updated in place are the master copy.
            "weights": bytes_of(replicas, without=pointers_of(master)),
            "master": bytes_of(master),
            "gradients": bytes_of(gradients),
            "optimizer": bytes_of(moments),
            "correction": bytes_of(tensors_in(state.update.correction), without=counted),
            "activations": most_held({(counts,) for counts in in_flight}, [(whole, half)]),
            "recomputed": recomputed,
        }

    def _measure_microbatch(self, state: StageState, *, split: bool) -> tuple[int, int, int]:
        """Bytes of one micro-batch: kept until its backward, kept between the halves of its backward, and
        recomputed within a backward."""
        train = self._config.train
        replica = state.weights.newest()
        module = replica.module
        if isinstance(module.head, HeadShard):
            return 0, self._measure_shard(module.head), 0
        permanent = [*module.buffers()]
        if module.rotation is not None:
            permanent.append(module.rotation)
        # A weight version has its biases once, whatever is in flight.
        experts = self._config.model.experts
        biases = {block: torch.zeros(experts, device=self._device) for block in module.expert_blocks}
        permanent += biases.values()
        tokens = torch.zeros(
            (train.microbatch_size, self._config.data.context), dtype=torch.long, device=self._device
        )
        activation = torch.zeros(
            (*tokens.shape, self._config.model.width), dtype=dtypes(self._config).replica, device=self._device
        )
        documents = None
        if self._config.data.document_mask:
            documents = whole_sequences(*tokens.shape, device=self._device)
        gradient = InputGradient()
        given = tokens if module.embedding is not None else graph_input(activation, gradient)
        deferred = DeferredGradients() if split else None
        saved = SavedTensors()

        with leaving_no_trace(module, self._device), torch.enable_grad(), deferring(deferred):
            with saved_tensors_hooks(saved.keep, same), watched_by(saved):
                targets = None if module.head is None else tokens.clone()
                output = module(given, Routing(biases), targets=targets, documents=documents)
                if module.head is not None:
                    output = output / 1
                saved.kept += [part for part in documents or () if part.device == self._device]
                whole = bytes_of(saved.kept, without=pointers_of([*permanent, *_weights(module)]))
            place = module.place(documents)
            recomputed = self._measure_recomputed(
                module,
                state.weights,
                activation.requires_grad_(),
                Routing(biases),
                place,
                permanent=[*permanent, *tensors_in(place)],
            )
            if state.weights.is_sharded:
                # torch has begun an iteration, which ends with a backward.
                output.backward()
                state.weights.gradient_buffer.flat.zero_()
                cast("ShardedWeights", state.weights).hide()
            if deferred is None:
                return whole, 0, recomputed
            start = given if given.requires_grad else replica.parameters[0]
            # No gradient is returned for an embedding that adds it (zero) to its buffer itself.
            torch.autograd.grad(output, start, torch.zeros_like(output), allow_unused=True)
            kept = bytes_of(deferred.kept(), without=pointers_of([*permanent, *_weights(module)]))
            return whole, kept, recomputed

    def _measure_shard(self, shard: HeadShard) -> int:
        """Bytes of one micro-batch that a shard of the head keeps from S to T."""
        shape = (self._config.train.microbatch_size, self._config.data.context)
        targets = torch.zeros(shape, dtype=torch.long, device=self._device)
        dtype = dtypes(self._config).replica
        _, kept = shard.run(
            torch.zeros((*shape, self._config.model.width), dtype=dtype, device=self._device), targets
        )
        return bytes_of(list(kept or ()))

    def _measure_recomputed(
        self,
        module: Stage,
        weights: WeightVersions,
        activation: Tensor,
        routing: Routing,
        place: Place,
        *,
        permanent: list[Tensor],
    ) -> int:
        """Bytes that recomputation makes of one block."""
        train, sizes_made = self._config.train, [0]
        if train.recompute == "none":
            return 0
        run_block, full = module.run_block, train.recompute == "full"
        if full:
            compiled = compiles_here(self._config, device=self._device.type)
            run_block = block_runner(
                self._config.model,
                recompute="none",
                compiled=compiled,
                sharded=weights.is_sharded,
            )
        for index in module.blocks:
            saved = SavedTensors()
            with deferring(None), saved_tensors_hooks(saved.keep, same), watched_by(saved):
                output = module.apply_block(index, activation, routing, place, run=run_block)
                if not full:
                    torch.autograd.grad(output, activation, torch.zeros_like(output))
            without = pointers_of([*permanent, *_weights(module), *(() if full else saved.kept)])
            made_again = [saved.kept] if full else saved.made_again
            sizes_made += [bytes_of(made, without=without) for made in made_again]
        return max(sizes_made)
