"""Checks of a configuration's correction for delay. Imports no torch."""

from __future__ import annotations

from optimizers import CORRECTIONS, METHODS, is_custom, method_named, refusal
from optimizers import check_correction as settings_of
from schedules import Op, Program
from schedules.analyze import staleness
from stages.config.limits import ConfigError
from stages.config.run_config import CORRECTION_NAMES, RunConfig, correction_options, optimizer_options
from stages.resolve.facts import Resolved


def check_correction_options(config: RunConfig) -> None:
    """Check the options of error feedback or another correction, or that there are none without one."""
    if config.error_feedback.decay_at == "x" and config.error_feedback.form != "buffered":
        raise ConfigError(
            "error_feedback.decay_at", "x needs the form that keeps it; accepted: form: buffered"
        )
    name, options = config.correction.name, correction_options(config.correction)
    if name == "none":
        if options:
            raise ConfigError(
                "correction", "has settings and no name; accepted: " + ", ".join(CORRECTION_NAMES)
            )
        return
    try:
        settings_of(name, options)
    except ValueError as error:
        raise ConfigError("correction", str(error)) from None


def check_correction(run: Resolved) -> None:
    """Check that the correction goes with the schedule and the optimizer.

    Raises:
        ConfigError: it does not.
    """
    config, name = run.config, run.config.correction.name
    if name == "none":
        return
    settings = settings_of(name, correction_options(config.correction))
    if config.error_feedback.coefficient != 0:
        raise ConfigError("correction.name", f"{name} and error feedback do not go together; accepted: none")
    correction = CORRECTIONS[name]
    program = run.program(first_step=run.sync_steps, steps=3)
    stashed = max(staleness(program).mismatch_max) == 0
    reason = refusal(name, synchronous=run.schedule.synchronous, stashed=stashed)
    if reason is not None:
        raise ConfigError("correction.name", f"{reason}; accepted: none")
    if correction.synchronous_start and program.update_interval != program.microbatches:
        raise ConfigError(
            "correction.name",
            f"{name} needs updates once per step; accepted with it: "
            f"schedule.update_interval = {program.microbatches}",
        )
    if correction.needs_one_version and not _has_one_version_per_update(program):
        raise ConfigError(
            "correction.name",
            f"{name} needs one weight version for all micro-batches of an update, as 2bw has, and pipedream "
            "with schedule.update_interval = 1",
        )
    if correction.reads_all_weights and config.parallel.data > 1:
        raise ConfigError(
            "parallel.data",
            f"is {config.parallel.data}, and {name} needs the master copy of all weights at every "
            "backward, which data ranks shard; accepted with it: 1",
        )
    if correction.prediction:
        flavour, optimizer = str(settings[correction.prediction]), config.optimizer
        if not method_named(optimizer.name).predicts(flavour, optimizer_options(optimizer)):
            raise ConfigError(f"correction.{correction.prediction}", _unpredictable(flavour, optimizer.name))


def _unpredictable(flavour: str, optimizer: str) -> str:
    """Why weight prediction of a flavour does not go with an optimizer."""
    if flavour == "adam-moments":
        able = ", ".join(name for name, method in METHODS.items() if method.predicts(flavour, {}))
        return f"adam-moments predicts from the moments of {able} only"
    if is_custom(optimizer):
        return "momentum: an optimizer of your own keeps its state under names of its own"
    return f"momentum: {optimizer} keeps none to predict from"


def _has_one_version_per_update(program: Program) -> bool:
    read: dict[tuple[int, int], int] = {}
    return all(
        read.setdefault((action.stage, action.microbatch // program.update_interval), action.version)
        == action.version
        for action in program.all_actions()
        if action.op is Op.FORWARD
    )
