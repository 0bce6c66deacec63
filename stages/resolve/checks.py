"""Resolves a configuration: its facts, or what is wrong with it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stages.config.limits import ConfigError as ConfigError
from stages.config.limits import check_limits
from stages.config.own_code import check_code, named_code
from stages.config.run_config import RunConfig
from stages.data.dataset import DataError
from stages.resolve.correction import check_correction, check_correction_options
from stages.resolve.data import check_data
from stages.resolve.device import check_device
from stages.resolve.facts import Resolved
from stages.resolve.model import check_model
from stages.resolve.optimizer import check_lr_schedule, check_optimizer
from stages.resolve.schedule import resolve_schedule


def resolve(
    config: RunConfig, *, seen: dict[str, int | DataError] | None = None
) -> Resolved | list[ConfigError]:
    """The facts of a run, or a list of what is wrong with its settings.

    Checks of one block rely on each other: the first problem in it ends the block. Later blocks report
    problems of their own.

    Args:
        config: the run's configuration.
        seen: cache of the vocabulary sizes of data sets, kept from call to call.
    """
    problems: list[ConfigError] = []
    with _noted(problems):
        named_code(config)
        check_limits(config)
        check_optimizer(config)
    if problems:
        return problems
    with _noted(problems):
        check_model(config)
    run: Resolved | None = None
    if not problems:
        with _noted(problems):
            check_correction_options(config)
            run = resolve_schedule(config)
            check_correction(run)
            check_device(config)
    with _noted(problems):
        check_lr_schedule(config)
    with _noted(problems):
        check_data(config, {} if seen is None else seen)
    if not problems:
        with _noted(problems):
            check_code(config)
    return problems if problems or run is None else run


@contextmanager
def _noted(problems: list[ConfigError]) -> Iterator[None]:
    """Add the problem that ends the block, if one does."""
    try:
        yield
    except ConfigError as error:
        problems.append(error)


def check(config: RunConfig, *, seen: dict[str, int | DataError] | None = None) -> Resolved:
    """The facts of a run that can be trained. Arguments are those of `resolve`.

    Raises:
        ConfigError: names the first invalid key, what is wrong and what is accepted.
    """
    found = resolve(config, seen=seen)
    if isinstance(found, Resolved):
        return found
    raise found[0]
