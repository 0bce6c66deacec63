"""What the parts of the model cost on a device, by a roofline: arithmetic at a share of its peak, and what is
moved through its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from asyncpp_cli.planner.devices import Device
from optimizers import METHODS, check_options
from optimizers.grouping import role_of
from optimizers.state_size import state_values
from stages.config import RunConfig, optimizer_options
from stages.memory import block_activations, sizes

MATRIX_SHARE = 0.65
"""Of the peak that large matrix products reach."""
ATTENTION_SHARE = 0.45
ITERATION_SHARE = 0.5
"""Of the peak that the matrix iteration of Muon and its kin reaches."""
ITERATIONS = 5
_ITERATED = ("muon", "normuon", "scion-spectral")
_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6


@dataclass(frozen=True, kw_only=True)
class Part:
    """Seconds of one micro-batch in one part of the model."""

    forward: float
    backward: float
    input_half: float
    """Of a backward in halves, which may take longer than a whole one."""
    weight_half: float


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Of the model's parts."""

    embedding: Part
    block: Part
    head: Part
    """Norm and loss included."""


@dataclass(frozen=True)
class Roofline:
    """Costs on a device, estimated from its data sheet."""

    device: Device

    @property
    def source(self) -> str:
        return f"{self.device.name} (data sheet)"

    def parts(self, config: RunConfig) -> Parts:
        """The parts of the run's model, with its micro-batches and precision."""
        model, size = config.model, sizes(config)
        tokens = config.train.microbatch_size * config.data.context
        peak = self._peak("bfloat16" if config.train.precision == "bfloat16" else "float32")
        bandwidth = self.device.bandwidth_gbs * _GIGA
        kv_width = model.kv_heads * (model.width // model.heads)
        matrices = 2 * model.width**2 + 2 * model.width * kv_width + 3 * model.width * model.mlp_width
        product = 2 * tokens * matrices / (peak * MATRIX_SHARE)
        # Causal: a token looks at half of the context on average, for the scores and for the values.
        attention = 2 * tokens * model.width * config.data.context / (peak * ATTENTION_SHARE)
        # What a block keeps, it has written and mostly read again.
        moved = 2 * block_activations(config) / bandwidth
        logits = tokens * model.vocab_size * (2 * size.wide + size.replica) / bandwidth
        head = 2 * tokens * model.width * model.vocab_size / (peak * MATRIX_SHARE)
        looked_up = tokens * model.width / bandwidth
        return Parts(
            embedding=_part(2 * looked_up * size.replica, 0.0, 3 * looked_up * size.master),
            block=_part(product + attention + moved, product + 2.5 * attention + 1.5 * moved, product),
            head=_part(head + logits, head + logits, head),
        )

    def update(self, config: RunConfig, shapes: Mapping[str, tuple[int, ...]]) -> float:
        """The optimizer step of a rank that owns parameters of these shapes, with what clips and writes."""
        size, name = sizes(config), config.optimizer.name
        parameters = sum(map(prod, shapes.values()))
        options = optimizer_options(config.optimizer)
        states = state_values(name, shapes, options)
        # Gradient: read for the norm, scaled, read, cleared. Master, state: read, written. Replica: written.
        moved = (4 + 2) * parameters * size.master + 2 * states * size.master + parameters * size.replica
        rules = METHODS[name].rules
        operations = 0.0
        for parameter, shape in shapes.items():
            if rules[role_of(parameter, len(shape)).value] in _ITERATED:
                short, long = sorted(shape)
                operations += ITERATIONS * (4 * short * short * long + 2 * short**3)
        peak = self._peak(
            "float32" if check_options(name, options).get("precision") == "float32" else "bfloat16"
        )
        return moved / (self.device.bandwidth_gbs * _GIGA) + operations / (peak * ITERATION_SHARE)

    def reduction(self, config: RunConfig, parameters: int) -> float:
        """A stage's gradients to their owners and weights back, over the network."""
        ranks, size = config.parallel.data, sizes(config)
        sent = parameters * (size.master + size.replica) * (ranks - 1) / ranks
        return sent / (self.device.network_gbs * _GIGA)

    def message(self, config: RunConfig) -> float:
        """One stage's activations or gradients to the next."""
        tokens = config.train.microbatch_size * config.data.context
        sent = tokens * config.model.width * sizes(config).replica
        return sent / (self.device.network_gbs * _GIGA) + self.device.latency_us * _MICRO

    def _peak(self, precision: str) -> float:
        return self.device.tflops[precision] * _TERA


def _part(forward: float, input_half: float, weight_half: float) -> Part:
    return Part(
        forward=forward, backward=input_half + weight_half, input_half=input_half, weight_half=weight_half
    )
