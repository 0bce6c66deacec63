"""What a member of the family declares about itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from schedules.actions import Program
from schedules.options import OPTIONS


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One member of the family: the function that returns its program, and facts for any geometry."""

    name: str
    description: str
    program: Callable[..., Program]
    """Takes a `Segment`, those of `OPTIONS` that it has as parameters, and `delayed_from` if it has that (see
    `schedules.build`)."""
    synchronous: bool
    """Whether every gradient is applied to the weights that it was computed at."""
    sharded: bool = False
    """Whether all processes are data ranks that hold the whole model in shards; none is a stage."""
    stages_per_rank: int = 1
    """Number of stages per rank, unless the schedule takes the option `chunks`."""
    ends_together: bool = False
    """Whether the first and the last stage can share a matrix: they are on one rank, and update in turn."""
    placement: Callable[[int], Sequence[int]] | None = None
    """Rank of each stage, from the number of ranks, where the model is cut so that ranks are equally fast;
    None: so that stages are."""
    synchronous_start: str = "1f1b"
    """Name of the synchronous schedule, with the same stages on the same ranks, of steps before any delay."""
    in_order: bool = True
    """Whether the last stage's backwards come in the order of its forwards."""
    bounded_activations: bool = True
    """Whether the activations in flight stop growing with the number of micro-batches per step."""
    planned: bool = True
    """Whether `asyncpp plan` considers it where no schedules are named."""
    lead: Callable[..., int] | None = None
    """Least d m for a delay of d with m micro-batches per step, where the delay is an option.

    Takes `ranks`, and those of `OPTIONS` that it has as parameters.
    """
    default_interval: Callable[[int], int] | None = None
    """Default update interval for m micro-batches per step; None: all stages update together, each step."""
    options: frozenset[str] = field(init=False)
    """The options that the schedule takes."""
    lead_options: frozenset[str] = field(init=False)
    """The options that `lead` takes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", options_of(self.program))
        lead_options = frozenset() if self.lead is None else options_of(self.lead)
        object.__setattr__(self, "lead_options", lead_options)

    @property
    def can_shard_head(self) -> bool:
        """Whether the head can be in shards (`schedules.head_shards`)."""
        return self.updates_together and self.in_order

    @property
    def updates_together(self) -> bool:
        """Whether all stages update together, with one gradient norm; if not, each updates on its own."""
        return self.default_interval is None


def parameters_of(function: Callable[..., object]) -> frozenset[str]:
    """Names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)


def options_of(function: Callable[..., object]) -> frozenset[str]:
    """The options that a function has as parameters."""
    return parameters_of(function).intersection(OPTIONS)
