"""Checks each key of a configuration against what its field accepts, and sizes against each other. Imports no
torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from stages.config.keys import KeyFacts, facts
from stages.config.run_config import RunConfig, tokens_per_step


class ConfigError(ValueError):
    """A value that is not accepted; names the key and what is accepted."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message


KEY_FACTS: Mapping[str, KeyFacts] = {
    f"{name}.{entry.name}": facts(entry)
    for name, section in vars(RunConfig()).items()
    if is_dataclass(section)
    for entry in fields(section)
} | {entry.name: facts(entry) for entry in fields(RunConfig) if entry.name == "seed"}
"""What each dotted key of a configuration accepts, in order."""

_values: Callable[[RunConfig], tuple[Any, ...]] = operator.attrgetter(*KEY_FACTS)


def check_limits(config: RunConfig) -> None:
    """Check every value of a configuration against what its key accepts.

    Raises:
        ConfigError: names the first key whose value is not accepted.
    """
    for (key, accepted), value in zip(KEY_FACTS.items(), _values(config), strict=True):
        if (reason := accepted.refusal(value)) is not None:
            raise ConfigError(key, reason)
    _check_together(config)


MOST_SEQUENCES = 10**7
"""Upper bound of sequences in a step, and in an evaluation."""


def _check_together(config: RunConfig) -> None:
    schedule, parallel, train = config.schedule, config.parallel, config.train
    sequences = {
        "per step": schedule.microbatches * parallel.data * train.microbatch_size,
        "per evaluation": max(
            train.eval_microbatches * train.microbatch_size, (train.eval_tokens or 0) // config.data.context
        ),
    }
    for what, count in sequences.items():
        if count > MOST_SEQUENCES:
            raise ConfigError(
                "train.microbatch_size",
                f"is {train.microbatch_size}, which makes {count:,} sequences {what}; accepted: "
                f"{MOST_SEQUENCES:,}",
            )
    if (tokens := tokens_per_step(config) * train.steps) >= 2**63:
        raise ConfigError("train.steps", f"is {train.steps}, which makes {tokens:.3g} tokens; accepted: 9e18")
