"""How long the stages of a layout take, and a step of all of them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from schedules.costs import Costs


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of a micro-batch and of an update at each stage. Tuples are indexed by stage."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """Recomputation counts here, and in `input_half` of a split backward."""
    input_half: tuple[float, ...]
    weight_half: tuple[float, ...]
    update: tuple[float, ...]
    reduction: tuple[float, ...]
    """Reduce-scatter of gradients and all-gather of weights over the data ranks."""
    message: tuple[float, ...]
    """A message between a stage and the one after it, from the end of the action that sends it to its
    arrival; to and from shards of the head it takes as long as the slowest."""
    head: tuple[float, ...] = ()
    """Logits and the gradient of their input in a shard of the head; 0 for other stages. Empty if the head is
    in the last stage."""
    head_weight: tuple[float, ...] = ()
    """The gradient of a shard's weights; 0 and empty as `head`."""
    embed: tuple[float, ...] = ()
    """A look-up in a shard that embedding and head share; 0 for other stages. Empty if there are none."""
    embed_weight: tuple[float, ...] = ()
    """The gradient of a look-up; 0 and empty as `embed`."""

    @property
    def microbatch(self) -> tuple[float, ...]:
        """All that a micro-batch takes in each stage, with whole backwards."""
        return self._summed("forward", "backward")

    @property
    def split_microbatch(self) -> tuple[float, ...]:
        """All that a micro-batch takes in each stage, with split backwards."""
        return self._summed("forward", "input_half", "weight_half")

    def _summed(self, *kinds: str) -> tuple[float, ...]:
        held = [getattr(self, kind) for kind in (*kinds, "head", "head_weight", "embed", "embed_weight")]
        return tuple(map(sum, zip(*filter(None, held), strict=True)))


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step in the steady state."""

    seconds: float
    bubble: float
    """Share of the step in which a rank waits, averaged over the ranks."""


def costs_of(times: StageTimes, *, shared: bool = False) -> Costs:
    """The costs of a program whose stages take so long.

    Args:
        times: of the stages.
        shared: whether messages wait for others on their links; otherwise each takes its own time.
    """
    message = max(times.message, default=0.0)
    latency = 0.0 if shared else message
    own = {field.name: getattr(times, field.name) for field in fields(times) if field.name != "message"}
    return Costs(
        **own,
        norm=0.0,
        latency=latency,
        hidden_latency=latency,
        part_latency=latency,
        next_latency=() if shared else times.message,
        transfer=message if shared else 0.0,
        jitter=0.0,
        seed=0,
    )
