"""Times of the model's parts by a roofline model: arithmetic at a share of the device's peak, and memory
traffic at its bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from asyncpp_cli.planner.costs.devices import Device
from asyncpp_cli.planner.costs.links import COPIED, HELD, LINK_SHARE
from optimizers import check_options, method_named
from optimizers.grouping import Role
from optimizers.state_size import state_values
from stages.config.places import DATA, PIPELINE
from stages.config.run_config import RunConfig, changed, optimizer_options
from stages.config.segments import places_of
from stages.data.documents import computed_share
from stages.memory.estimate import head_chunk_rows, message_bytes, sizes
from stages.shape.families import describe
from stages.shape.moe import mixture_of
from stages.shape.spec import Parameter, PartSpec

EAGER_TRAFFIC = 2.5
"""Times as much that blocks read and write if they are not compiled: each elementwise kernel by itself. It
fits the published speeds in docs/plan.md."""
ITERATION_SHARE = 0.5
"""Share of the peak that the matrix iteration of Muon and similar rules reaches."""
WORTH_MOVING = 0.9
"""Time to send with pipelines within nodes over that with data ranks, below which they are put there."""
SPREAD = 0.015
"""Standard deviation of the speeds of GPUs of one kind, as a share: all but a few of a cluster are within 8 %
of each other (arXiv 2208.11035)."""
_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6


@dataclass(frozen=True, kw_only=True)
class PartTimes:
    """Seconds of one micro-batch in one part of the model."""

    forward: float
    backward: float
    input_half: float
    """First half of a split backward. The two halves may take longer than `backward`."""
    weight_half: float
    cheap: float
    """What selective recomputation adds to the backward; 0 except in a block."""
    summed: float = 0.0
    """What adding the gradients of matrices to the sum over micro-batches takes of `backward`, and of
    `weight_half`: the sum is read and written."""


@dataclass(frozen=True, kw_only=True)
class ModelTimes:
    """Times of the model's parts."""

    embedding: PartTimes
    blocks: tuple[PartTimes, ...]
    halves: tuple[PartTimes, ...]
    """Attention and MLP of each block, as in `ModelSpec`."""
    head: PartTimes
    """Includes the final norm and the loss."""

    def piece(self, halves: range) -> PartTimes:
        """Times of a block, or of one of its halves, by the numbers of its halves."""
        return self.blocks[halves[0] // 2] if len(halves) == 2 else self.halves[halves[0]]


@dataclass(frozen=True)
class Roofline:
    """Times on a device, estimated from its data sheet."""

    device: Device

    @property
    def source(self) -> str:
        return f"{self.device.name} (data sheet)"

    def over(self, **links: Any) -> Roofline:
        """This GPU with other links.

        Args:
            links: fields of `Device` and their values.
        """
        return Roofline(replace(self.device, **links))

    @property
    def threads(self) -> None:
        """None: data sheets are those of GPUs."""
        return None

    def parts(self, config: RunConfig) -> ModelTimes:
        """Times of the model's parts at the run's micro-batch size and precision."""
        model, spec, size = config.model, describe(config.model), sizes(config)
        tokens = config.train.microbatch_size * config.data.context
        peak, bandwidth = self._slowest_peak(config), self.device.bandwidth_gbs * _GIGA
        logits = tokens * model.vocab_size * (2 * size.wide + size.replica) / bandwidth
        head = 2 * tokens * spec.head.multiply_adds / (peak * self.device.matrix_share)
        looked_up = tokens * model.width / bandwidth
        rows = head_chunk_rows(config)
        chunks = 0 if rows is None else -(-tokens // rows)
        # Each chunk reads and writes the gradient of the head's matrix.
        summed = chunks * 2 * model.width * model.vocab_size * size.wide / bandwidth
        kinds = {id(part): part for part in (*spec.blocks, *spec.halves)}
        times = {kind: self._block(config, part) for kind, part in kinds.items()}
        return ModelTimes(
            embedding=_part(2 * looked_up * size.replica, 0.0, 3 * looked_up * size.master),
            blocks=tuple(times[id(block)] for block in spec.blocks),
            halves=tuple(times[id(half)] for half in spec.halves),
            # In chunks, the gradients are taken in the forward.
            head=_part(head + logits, head + logits, head, summed=self._summed(config, spec.head))
            if rows is None
            else _part(3 * head + 2 * logits + summed, 2 * looked_up * size.replica, 0.0),
        )

    def mfu(self, config: RunConfig, *, tokens_per_second: float) -> float:
        """Model FLOPs utilization in 0..1 of a run at this speed, one of these devices per rank."""
        flops = describe(config.model).training_flops(context=config.data.context)
        precision = "bfloat16" if config.train.precision == "bfloat16" else "float32"
        ranks = config.parallel.stages * config.parallel.data
        return tokens_per_second * flops / ranks / self._peak(precision)

    def _block(self, config: RunConfig, block: PartSpec) -> PartTimes:
        """Times of a block, or of a half of one, for a micro-batch."""
        size, tokens = sizes(config), config.train.microbatch_size * config.data.context
        peak, bandwidth = self._slowest_peak(config), self.device.bandwidth_gbs * _GIGA
        product = 2 * tokens * block.multiply_adds / (peak * self.device.matrix_share)
        scores = 2 * tokens * block.attention * config.data.context * computed_share(config.data)
        attention = scores / (peak * self.device.attention_share)
        # A block writes the activations it keeps, and reads most of them again.
        traffic = EAGER_TRAFFIC if config.train.compile is False else 1.0
        moved = 2 * tokens * size.of(block.kept) * traffic / bandwidth
        forward, input_half, weight_half = (
            moved / bandwidth for moved in _routed_bytes(config, block, tokens=tokens)
        )
        return _part(
            product + attention + moved + forward,
            product + 2.5 * attention + 1.5 * moved + input_half,
            product + weight_half,
            # Each cheap part reads about as much as it writes.
            2 * tokens * sum(size.of(part) for part in block.cheap) / bandwidth,
            summed=self._summed(config, block),
        )

    def _summed(self, config: RunConfig, part: PartSpec) -> float:
        """`summed` of a part; that of stacks is counted with their experts."""
        values = sum(
            parameter.size
            for parameter in part.parameters
            if parameter.role in (Role.MATRIX, Role.HEAD) and len(parameter.shape) == 2
        )
        return 2 * values * sizes(config).master / (self.device.bandwidth_gbs * _GIGA)

    def _slowest_peak(self, config: RunConfig) -> float:
        """Peak of the slowest of the run's GPUs, for which the others wait, FLOP/s."""
        ranks = config.parallel.stages * config.parallel.data
        behind = SPREAD * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))  # Blom's approximation
        return self._peak("bfloat16" if config.train.precision == "bfloat16" else "float32") / (1 + behind)

    def update(self, config: RunConfig, parameters: Sequence[Parameter]) -> float:
        """The optimizer step on these parameters, with clipping and the copy to the replica."""
        size, name = sizes(config), config.optimizer.name
        count = sum(parameter.size for parameter in parameters)
        options = optimizer_options(config.optimizer)
        states = state_values(name, [(parameter.role, parameter.shape) for parameter in parameters], options)
        # Gradient: read for the norm, scaled, read, cleared. Master, state: read, written. Replica: written.
        moved = (4 + 2) * count * size.master + 2 * states * size.master + count * size.replica
        method, settings, operations = method_named(name), check_options(name, options), 0.0
        for parameter in parameters:
            if flops := method.rule(parameter.role.value).flops:
                operations += flops(settings, *sorted(parameter.shape))
        peak = self._peak("float32" if settings.get("precision") == "float32" else "bfloat16")
        return moved / (self.device.bandwidth_gbs * _GIGA) + operations / (peak * ITERATION_SHARE)

    def reduction(self, config: RunConfig, parameters: int) -> float:
        """Reduce-scatter of a stage's gradients and all-gather of its new weights over the data ranks."""
        node, places = self.device.gpus_per_node, places_of(config)
        if places.neighbours == DATA:
            within, stages_in_node = node % places.data == 0, max(1, node // places.data)
        else:
            within, stages_in_node = places.stages * places.data <= node, min(places.stages, node)
        # Of a node's own adapter each stage in the node has a share.
        rate = self._within if within else self._adapter(users=stages_in_node)
        return self._reduced_bytes(config, parameters) / rate

    def beside_reduction(self, config: RunConfig, parameters: int) -> float:
        """Seconds that what is computed beside that takes longer, as beside exchanges of FSDP."""
        copied = self._reduced_bytes(config, parameters) / self._within
        return HELD * self.reduction(config, parameters) + COPIED * copied

    def _reduced_bytes(self, config: RunConfig, parameters: int) -> float:
        ranks, size = config.parallel.data, sizes(config)
        return parameters * (size.master + size.replica) * (ranks - 1) / ranks

    def neighbours(self, config: RunConfig) -> str:
        """Ranks that share nodes (`stages.config.places`), so that less is sent between nodes."""
        stages, data = config.parallel.stages, config.parallel.data
        if 1 in (stages, data) or stages * data <= self.device.gpus_per_node:
            return config.site.neighbours
        parameters = describe(config.model).parameter_count // stages

        def sending(placed: RunConfig) -> float:
            """Seconds of the messages and the reduction of a step."""
            messages = (self.message(placed, rank, rank + 1) for rank in range(stages - 1))
            return config.schedule.microbatches * max(messages) + self.reduction(placed, parameters)

        [other] = {DATA, PIPELINE} - {config.site.neighbours}
        moved = sending(changed(config, {"site.neighbours": other})) < WORTH_MOVING * sending(config)
        return other if moved else config.site.neighbours

    def message(self, config: RunConfig, sender: int, receiver: int) -> float:
        """Sending activations or gradients from one rank of a pipeline to another: over the network, unless
        they share a node in every pipeline."""
        node, places = self.device.gpus_per_node, places_of(config)
        within = all(
            places.process(sender, pipeline) // node == places.process(receiver, pipeline) // node
            for pipeline in range(min(places.data, node))
        )
        # Of a node's own adapter each pipeline whose message leaves the node has a share.
        leaving = min(places.data, node) if places.neighbours == DATA else max(1, node // places.stages)
        rate = self._within if within else self._adapter(users=leaving)
        return message_bytes(config) / rate + self.device.latency_us * _MICRO

    def _adapter(self, *, users: int) -> float:
        """Rate to other nodes, bytes per second, where so many share a node's adapter, if it has but one."""
        shared = self.device.gpus_per_node / users if self.device.shares_adapter else 1.0
        return self.device.network_gbs * _GIGA * shared

    @property
    def _within(self) -> float:
        """Rate between GPUs of a node, bytes per second."""
        return self.device.link_gbs * _GIGA * LINK_SHARE

    def _peak(self, precision: str) -> float:
        return self.device.tflops[precision] * _TERA


def _routed_bytes(config: RunConfig, block: PartSpec, *, tokens: int) -> tuple[int, int, int]:
    """Bytes that experts move in a forward and in the halves of its backward, besides what they keep: their
    passes over the rows and their stacks, counted in docs/experts.md; 0 of a block without."""
    mixture, size = mixture_of(config.model), sizes(config)
    if mixture is None or not block.biases:
        return 0, 0, 0
    wide, narrow = (
        tokens * mixture.active * columns * size.replica for columns in (config.model.width, mixture.width)
    )
    stacks = sum(parameter.size for parameter in block.parameters if len(parameter.shape) == 3)
    # A stack's gradient is written, read again and added to the sum.
    added = stacks * (2 * size.replica + 2 * size.master)
    read = stacks * size.replica
    # The products with gate and up, which are kept, are counted with what a block keeps.
    return 5 * wide + 2 * narrow + read, 6 * wide + 3 * narrow + read, 4 * wide + 3 * narrow + added


def _part(
    forward: float, input_half: float, weight_half: float, cheap: float = 0.0, *, summed: float = 0.0
) -> PartTimes:
    return PartTimes(
        forward=forward,
        backward=input_half + weight_half + summed,
        input_half=input_half,
        weight_half=weight_half + summed,
        cheap=cheap,
        summed=summed,
    )
