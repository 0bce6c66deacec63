"""Bounds of the numbers in a configuration. Imports no torch.

Upper bounds are far beyond any real run. They keep `sweep` from spending minutes on a typo, and a run from
failing where a number leaves the range of float32, signed 64-bit integers, or the system's clocks.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from stages.config import RunConfig, tokens_per_step


class ConfigError(ValueError):
    """A value that is not accepted; names the key and what is accepted."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message


def check_limits(config: RunConfig) -> None:
    """Check every number of a configuration against its bounds.

    Raises:
        ConfigError: names the first key out of bounds.
    """
    for key, value in _numbers(config):
        largest = LARGEST.get(key, LARGEST_OF_OTHERS)
        if abs(value) > largest:
            raise ConfigError(key, f"is {_shown(value)}, must be at most {_shown(largest)}")
    at_least_one = {
        "schedule.microbatches": config.schedule.microbatches,
        "schedule.delay": config.schedule.delay,
        "schedule.ahead": config.schedule.ahead,
        "schedule.chunks": config.schedule.chunks,
        "parallel.stages": config.parallel.stages,
        "parallel.data": config.parallel.data,
        "model.layers": config.model.layers,
        "model.width": config.model.width,
        "model.heads": config.model.heads,
        "model.kv_heads": config.model.kv_heads,
        "model.mlp_width": config.model.mlp_width,
        "data.context": config.data.context,
        "train.steps": config.train.steps,
        "train.microbatch_size": config.train.microbatch_size,
        "train.eval_interval": config.train.eval_interval,
        "train.eval_microbatches": config.train.eval_microbatches,
        "site.threads": config.site.threads,
        "site.keep_checkpoints": config.site.keep_checkpoints,
    }
    for key, count in at_least_one.items():
        if count < 1:
            raise ConfigError(key, f"is {count}, must be at least 1")
    if config.site.memory_gb is not None and not config.site.memory_gb > 0:
        raise ConfigError("site.memory_gb", f"is {config.site.memory_gb:g}, must be above 0, or null")
    positive = {
        "optimizer.lr": config.optimizer.lr,
        "model.norm_eps": config.model.norm_eps,
        "train.clip_norm": config.train.clip_norm,
        "site.timeout": config.site.timeout,
        "site.start_timeout": config.site.start_timeout,
        "site.save_timeout": config.site.save_timeout,
        "site.grace": config.site.grace,
        "site.peak_tflops": 1.0 if config.site.peak_tflops is None else config.site.peak_tflops,
    }
    for key, number in positive.items():
        if not number > 0:
            raise ConfigError(key, f"is {number:g}, must be above 0")
    not_negative = {
        "optimizer.weight_decay": config.optimizer.weight_decay,
        "optimizer.final_lr": config.optimizer.final_lr,
        "error_feedback.coefficient": config.error_feedback.coefficient,
        "train.max_skipped": config.train.max_skipped,
        "train.checkpoint_interval": config.train.checkpoint_interval,
        "seed": config.seed,
    }
    for key, number in not_negative.items():
        if not number >= 0:
            raise ConfigError(key, f"is {number:g}, must be 0 or more")
    if not 0 <= config.optimizer.warmup <= 1:
        raise ConfigError("optimizer.warmup", f"is {config.optimizer.warmup:g}, must be a share from 0 to 1")
    if not 0 < config.data.validation_share < 1:
        share = config.data.validation_share
        raise ConfigError("data.validation_share", f"is {share:g}, must be a share between 0 and 1")
    _check_together(config)


LARGEST: dict[str, float] = {
    "schedule.microbatches": 100_000,
    "schedule.delay": 1_000,
    "schedule.ahead": 1_000,
    "schedule.chunks": 1_000,
    "schedule.update_interval": 100_000,
    "train.clip_norm": 1e30,
    "model.layers": 10_000,
    "model.width": 10**6,
    "model.heads": 10**5,
    "model.kv_heads": 10**5,
    "model.head_dim": 10**5,
    "model.mlp_width": 10**7,
    "model.vocab_size": 2**31 - 1,
    "model.rope_base": 1e15,
    "model.norm_eps": 1.0,
    "data.context": 10**7,
    "parallel.stages": 10_000,
    "parallel.data": 10_000,
    "train.steps": 10**7,
    "train.microbatch_size": 10**5,
    "train.eval_microbatches": 10**6,
    "site.timeout": 1e8,
    "site.start_timeout": 1e8,
    "site.save_timeout": 1e8,
    "site.grace": 1e6,
    "site.threads": 10_000,
    "seed": 2**63 - 1,
}
"""Upper bound by key."""

LARGEST_OF_OTHERS = 1e9
"""Upper bound of all other numbers: products of three stay within float32."""

MOST_SLOTS = 100_000
"""Upper bound of stages times micro-batches in a step, the size of a step's program."""

MOST_SEQUENCES = 10**7
"""Upper bound of sequences in a step, and in an evaluation."""


def _check_together(config: RunConfig) -> None:
    if config.model.rope_base < 1:
        raise ConfigError("model.rope_base", f"is {config.model.rope_base:g}, must be at least 1")
    schedule, parallel, train = config.schedule, config.parallel, config.train
    slots = parallel.stages * schedule.chunks * schedule.microbatches
    if slots > MOST_SLOTS:
        raise ConfigError(
            "schedule.microbatches",
            f"{schedule.microbatches} micro-batches on {parallel.stages * schedule.chunks} stages make a "
            f"program of {slots:,} parts a step; accepted: {MOST_SLOTS:,}",
        )
    sequences = {
        "a step": schedule.microbatches * parallel.data * train.microbatch_size,
        "an evaluation": train.eval_microbatches * train.microbatch_size,
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


def _numbers(config: Any, prefix: str = "") -> list[tuple[str, float]]:
    """Every dotted key whose value is a number, in order."""
    numbers: list[tuple[str, float]] = []
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value):
            numbers += _numbers(value, f"{prefix}{entry.name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers.append((f"{prefix}{entry.name}", value))
    return numbers


def _shown(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 2**64 else "beyond 64 bits"
    return f"{value:g}"
