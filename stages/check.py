"""Can this configuration run? Asked of every cell before anything is written. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import schedules
from optimizers import CORRECTIONS as CORRECTION_METHODS
from optimizers import NAMES as OPTIMIZER_NAMES
from optimizers import check_correction, check_options, refusal
from stages.config import RunConfig, correction_options, optimizer_options
from stages.corpus import BYTE_VALUES, DataError, vocabulary
from stages.limits import ConfigError as ConfigError
from stages.limits import check_limits
from stages.programs import segment_program, sync_steps

CLIPS = ("global", "stage", "none")
PRECISIONS = ("float32", "float64", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
FORMS = ("look-ahead", "buffered")
CORRECTIONS = ("none", *(name for name in CORRECTION_METHODS if not name.startswith("error-feedback")))
"""Those that the trainer carries, beside error feedback."""


def check(config: RunConfig, *, seen: dict[tuple[Any, ...], int | DataError] | None = None) -> None:
    """Raise for the first thing in `config` that cannot run.

    Args:
        config: the run's.
        seen: what the data of earlier configurations needs, kept from call to call.

    Raises:
        ConfigError: names the key, what is wrong and what would be accepted.
    """
    check_limits(config)
    _one_of("schedule.name", config.schedule.name, schedules.NAMES)
    _one_of("optimizer.name", config.optimizer.name, OPTIMIZER_NAMES)
    _one_of("train.clip", config.train.clip, CLIPS)
    _one_of("train.precision", config.train.precision, PRECISIONS)
    _one_of("error_feedback.form", config.error_feedback.form, FORMS)
    _one_of("error_feedback.decay_at", config.error_feedback.decay_at, ("y", "x"))
    if config.error_feedback.decay_at == "x" and config.error_feedback.form != "buffered":
        raise ConfigError(
            "error_feedback.decay_at", "x needs the form that keeps it; accepted: form: buffered"
        )
    _one_of("site.device", config.site.device, DEVICES)
    _check_model(config)
    _check_schedule(config)
    _check_optimizer(config)
    _check_correction(config)
    _check_compile(config)
    check_data(config, {} if seen is None else seen)


def _check_model(config: RunConfig) -> None:
    model = config.model
    if model.width % model.heads:
        raise ConfigError("model.heads", f"is {model.heads}, must divide model.width = {model.width}")
    if model.width // model.heads % 2:
        head = model.width // model.heads
        raise ConfigError(
            "model.heads", f"gives heads of width {head}, which must be even for rotary positions"
        )
    if model.heads % model.kv_heads:
        raise ConfigError("model.kv_heads", f"is {model.kv_heads}, must divide model.heads = {model.heads}")
    if model.factory is not None:
        _check_factory(config, model.factory)


def _check_factory(config: RunConfig, factory: str) -> None:
    module, colon, function = factory.partition(":")
    if not colon or not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError("model.factory", f"is {factory!r}; accepted: package.module:function, or null")
    try:
        found = find_spec(module) is not None
    except ImportError:
        found = False
    if not found:
        raise ConfigError(
            "model.factory",
            f"there is no module {module} to import; install it, or name its folder in PYTHONPATH",
        )
    if config.model.init is not None:
        raise ConfigError(
            "model.init", "goes with the decoder, not with model.factory; accepted with it: null"
        )
    if config.train.compile:
        raise ConfigError(
            "train.compile", "goes with the decoder, not with model.factory; accepted with it: false"
        )


def _check_schedule(config: RunConfig) -> None:
    name, geometry = config.schedule.name, config.schedule
    if schedules.FAMILY[name].takes_delay:
        _check_delay(config)
    try:
        segment_program(config, first_step=0, steps=1)
    except schedules.ScheduleError as error:
        raise ConfigError("schedule", str(error)) from None
    stages = config.parallel.stages * geometry.chunks
    if stages > config.model.layers:
        raise ConfigError(
            "parallel.stages",
            f"{stages} stages are asked for; the model {config.model.name} has {config.model.layers} blocks, "
            "and every stage needs one",
        )
    cut = config.parallel.cut
    if cut is not None and (len(cut) != stages or sum(cut) != config.model.layers or min(cut) < 1):
        raise ConfigError(
            "parallel.cut",
            f"is {cut}; accepted: the blocks of {stages} stages, at least one each and "
            f"{config.model.layers} in all",
        )
    if config.error_feedback.coefficient != 0 and schedules.is_synchronous(name):
        raise ConfigError(
            "error_feedback", f"corrects for delay, and the schedule {name} has none; accepted with it: false"
        )
    if config.train.clip == "global" and schedules.FAMILY[name].default_interval is not None:
        raise ConfigError(
            "train.clip",
            f"global needs a step that all stages share, and under {name} each stage updates on its own; "
            "accepted with it: stage, none",
        )


def _check_delay(config: RunConfig) -> None:
    schedule, stages = config.schedule, config.parallel.stages
    microbatches, delay, ahead = schedule.microbatches, schedule.delay, schedule.ahead
    smallest = schedules.smallest_delay(stages=stages, microbatches=microbatches, ahead=ahead)
    if delay < smallest:
        needed = -(-ahead * (stages - 1) // delay)
        further = "" if ahead == 1 else f" and schedule.ahead = {ahead}"
        raise ConfigError(
            "schedule.microbatches",
            f"is {microbatches}; {schedule.name} with {stages} stages needs at least {needed} "
            f"micro-batches a step for schedule.delay = {delay}{further} (with {microbatches}, the smallest "
            f"delay is {smallest})",
        )


def _check_optimizer(config: RunConfig) -> None:
    try:
        check_options(config.optimizer.name, optimizer_options(config.optimizer))
    except ValueError as error:
        raise ConfigError("optimizer", str(error)) from None


def _check_correction(config: RunConfig) -> None:
    name = config.correction.name
    _one_of("correction.name", name, CORRECTIONS)
    if name == "none":
        if correction_options(config.correction):
            raise ConfigError(
                "correction", "has settings and no name; accepted: " + ", ".join(CORRECTIONS[1:])
            )
        return
    try:
        settings = check_correction(name, correction_options(config.correction))
    except ValueError as error:
        raise ConfigError("correction", str(error)) from None
    if config.error_feedback.coefficient != 0:
        raise ConfigError("correction.name", f"{name} and error feedback do not go together; accepted: none")
    program = segment_program(config, first_step=sync_steps(config), steps=3)
    stashed = max(schedules.analyze(program).mismatch_max) == 0
    reason = refusal(name, synchronous=schedules.is_synchronous(config.schedule.name), stashed=stashed)
    if reason is not None:
        raise ConfigError("correction.name", f"{reason}; accepted: none")
    if name == "sync-start" and program.update_interval != program.microbatches:
        raise ConfigError(
            "correction.name",
            f"{name} needs updates once a step; accepted with it: "
            f"schedule.update_interval = {program.microbatches}",
        )
    if name == "delay-compensation" and not _one_version_an_update(program):
        raise ConfigError(
            "correction.name",
            f"{name} needs one weight version for all micro-batches of an update, as 2bw has, and pipedream "
            "with schedule.update_interval = 1",
        )
    if name == "discrepancy" and config.parallel.data > 1:
        raise ConfigError(
            "parallel.data",
            f"is {config.parallel.data}, and {name} needs the master copy of all weights at every "
            "backward, which data ranks share out; accepted with it: 1",
        )
    flavour, optimizer = settings.get("flavour"), config.optimizer
    if flavour == "adam-moments" and optimizer.name != "adamw":
        raise ConfigError("correction.flavour", "adam-moments predicts from the moments of adamw only")
    if flavour == "momentum" and (optimizer.name in ("soap", "basis-rotation") or optimizer.momentum == 0):
        raise ConfigError("correction.flavour", f"momentum: {optimizer.name} keeps none to predict from")


def _check_compile(config: RunConfig) -> None:
    if not config.train.compile:
        return
    name, program = config.schedule.name, segment_program(config, first_step=sync_steps(config), steps=3)
    if any(action.op is schedules.Op.BACKWARD_INPUT for action in program.all_actions()):
        raise ConfigError(
            "train.compile",
            f"{name} computes a backward in two halves, and a compiled block's is one piece; "
            "accepted with it: false",
        )
    if not config.train.recompute and max(schedules.analyze(program).mismatch_max) > 0:
        raise ConfigError(
            "train.compile",
            f"under {name} weights change between forward and backward, and which activations a compiled "
            "block keeps, and which it computes anew from the newer weights, is the compiler's choice; "
            "accepted with it: train.recompute: true (all are computed anew)",
        )


def _one_version_an_update(program: schedules.Program) -> bool:
    read: dict[tuple[int, int], int] = {}
    return all(
        read.setdefault((action.stage, action.microbatch // program.update_interval), action.version)
        == action.version
        for action in program.all_actions()
        if action.op is schedules.Op.FORWARD
    )


def check_data(config: RunConfig, seen: dict[tuple[Any, ...], int | DataError]) -> None:
    """Whether the data is there, is what the run is made for, and goes with the model.

    Args:
        config: the run's.
        seen: what the data of earlier configurations needs, kept from call to call.

    Raises:
        ConfigError: as `check`.
    """
    data = config.data
    key = (data.path, data.sha256, data.context, data.validation_share)
    if key not in seen:
        try:
            seen[key] = vocabulary(data)
        except DataError as error:
            seen[key] = error
    needed = seen[key]
    if isinstance(needed, DataError):
        raise ConfigError("data.path", str(needed))
    if config.model.vocab_size < needed:
        what = f"the data in {data.path}" if needed != BYTE_VALUES else "text read as bytes"
        raise ConfigError(
            "model.vocab_size",
            f"is {config.model.vocab_size}, {what} needs {needed} or more",
        )


def _one_of(key: str, value: str, accepted: Collection[str]) -> None:
    if value not in accepted:
        raise ConfigError(key, f"{value!r} is not known; accepted: {', '.join(accepted)}")
