"""Checks each key of a configuration against what its field accepts, and sizes against each other. Imports no
torch."""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, cast

from stages.config.keys import KeyFacts, facts, unknown
from stages.config.run_config import RunConfig, tokens_per_step


class ConfigError(ValueError):
    """A value that is not accepted; names the key and what is accepted."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message


def one_of(key: str, value: str, accepted: Collection[str]) -> None:
    """Check that a key's value is one of those accepted."""
    if value not in accepted:
        raise ConfigError(key, unknown(value, accepted))


def check_limits(config: RunConfig) -> None:
    """Check every value of a configuration against what its key accepts.

    Raises:
        ConfigError: names the first key whose value is not accepted.
    """
    for key, value, accepted in _keys(config):
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


@functools.cache
def _declared(section: Hashable) -> list[tuple[str, KeyFacts]]:
    """What each key of a section accepts, looked up once: a thousand cells have a hundred thousand keys."""
    return [(entry.name, facts(entry)) for entry in fields(cast(Any, section))]


def _keys(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, KeyFacts]]:
    """Every dotted key with its value and what it accepts, in order."""
    for name, accepted in _declared(cast(Hashable, type(config))):
        value = getattr(config, name)
        if is_dataclass(value):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value, accepted
