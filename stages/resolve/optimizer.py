"""Checks of a configuration's optimizer. Imports no torch, but for an optimizer of the user's own."""

from __future__ import annotations

from optimizers import check_options, is_custom
from stages.config.limits import ConfigError
from stages.config.own_code import raised_in
from stages.config.run_config import RunConfig, declared_options, optimizer_options
from stages.update.lr_schedule import DECAY_SHARE, SCHEDULES


def check_optimizer(config: RunConfig) -> None:
    """Check the optimizer and its options.

    A custom optimizer is imported, which imports torch, and takes a few steps.

    Raises:
        ConfigError: see `check`.
    """
    name, options = config.optimizer.name, config.optimizer.options
    if is_custom(name):
        for option in declared_options(config.optimizer):
            raise ConfigError(
                f"optimizer.{option}",
                f"is not passed to {name}; accepted with it: optimizer.options.{option}",
            )
        from optimizers.custom import OptimizerError, check_custom

        try:
            check_custom(name, tuple(sorted(options.items())))
        except OptimizerError as error:
            raise ConfigError("optimizer.name", f"{error}{raised_in(error, config)[1]}") from None
        return
    for option in options:
        raise ConfigError(
            f"optimizer.options.{option}", f"is for an optimizer of your own; {name} takes optimizer.{option}"
        )
    try:
        check_options(name, optimizer_options(config.optimizer))
    except ValueError as error:
        raise ConfigError("optimizer", str(error)) from None


def check_lr_schedule(config: RunConfig) -> None:
    """Check the learning rate's schedule against its settings."""
    optimizer = config.optimizer
    share = optimizer.decay_share
    if share is not None and not SCHEDULES[optimizer.schedule].has_decay_share:
        takers = ", ".join(name for name, schedule in SCHEDULES.items() if schedule.has_decay_share)
        raise ConfigError(
            "optimizer.decay_share", f"is of {takers}, not of {optimizer.schedule}; accepted with it: null"
        )
    decay = DECAY_SHARE if share is None else share
    if SCHEDULES[optimizer.schedule].has_decay_share and optimizer.warmup + decay > 1 + 1e-9:
        raise ConfigError(
            "optimizer.decay_share",
            f"is {decay:g}, which with optimizer.warmup = {optimizer.warmup:g} is more than the run; "
            f"accepted with it: at most {1 - optimizer.warmup:g}",
        )
