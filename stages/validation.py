"""Validation of a configuration, done for every cell before anything is written. Imports no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import schedules
from optimizers import CORRECTIONS, METHODS, check_correction, check_options, is_custom, method_named, refusal
from optimizers import NAMES as OPTIMIZER_NAMES
from optimizers.growth import growth_refusal
from schedules.catalogue import least_lead
from schedules.options import checked
from stages.config.keys import unknown
from stages.config.limits import ConfigError as ConfigError
from stages.config.limits import check_limits
from stages.config.own_code import check_code, named_code, names_defined, raised_in
from stages.config.run_config import (
    CORRECTION_NAMES,
    OWN_SPLIT,
    DataConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    correction_options,
    declared_options,
    optimizer_options,
    trained_paths,
)
from stages.config.segments import (
    has_tied_shards,
    is_sharded,
    schedule_facts,
    schedule_options,
    segment_program,
    sync_steps,
)
from stages.data.dataset import (
    BYTE_VALUES,
    DataError,
    is_prepared,
    recorded_end_of_document,
    tokenizer_of,
    vocabulary,
    where_of,
)
from stages.model.compiler import compile_refusal
from stages.shape.families import FAMILIES
from stages.shape.head import has_terms
from stages.shape.moe import BALANCES, SCORES
from stages.shape.spec import head_dim
from stages.update.lr_schedule import DECAY_SHARE, SCHEDULES
from stages.weights.gradient_buffers import gradient_buffers


def check(config: RunConfig, *, seen: dict[str, int | DataError] | None = None) -> None:
    """Check the settings of a run.

    Args:
        config: the run's configuration.
        seen: cache of the vocabulary sizes of data sets, kept from call to call.

    Raises:
        ConfigError: names the first invalid key, what is wrong and what is accepted.
    """
    for problem in problems(config, seen=seen):
        raise problem


def problems(config: RunConfig, *, seen: dict[str, int | DataError] | None = None) -> Iterator[ConfigError]:
    """What is wrong with the settings of a run; of checks that rely on each other, what the first one finds.

    Args:
        config: the run's configuration.
        seen: see `check`.
    """

    def data(config: RunConfig) -> None:
        check_data(config, {} if seen is None else seen)

    basic = _first(config, named_code, check_limits, _check_schedule_name, check_optimizer, _check_decay)
    if basic is not None:
        yield basic
        return
    found = False
    of_model = (check_model, _check_parametrization)
    of_schedule = (
        _check_correction_options,
        check_schedule,
        _check_correction,
        _check_compile,
        _check_cuda_graphs,
    )
    for checks in (of_model, of_schedule, (_check_lr_schedule,), (data, _check_document_mask)):
        if found and checks is of_schedule:
            continue
        if (problem := _first(config, *checks)) is not None:
            found = True
            yield problem
    if not found and (problem := _first(config, check_code)) is not None:
        yield problem


def _first(config: RunConfig, *checks: Callable[[RunConfig], object]) -> ConfigError | None:
    try:
        for each in checks:
            each(config)
    except ConfigError as error:
        return error
    return None


def _check_schedule_name(config: RunConfig) -> None:
    if not schedules.is_custom(config.schedule.name):
        _one_of("schedule.name", config.schedule.name, (*schedules.KNOWN, "package.module:function"))


def _check_decay(config: RunConfig) -> None:
    if config.error_feedback.decay_at == "x" and config.error_feedback.form != "buffered":
        raise ConfigError(
            "error_feedback.decay_at", "x needs the form that keeps it; accepted: form: buffered"
        )


def check_model(config: RunConfig) -> None:
    """Check the sizes of the model against each other, and its family, experts and factory.

    Raises:
        ConfigError: names the first invalid key, what is wrong and what is accepted.
    """
    model = config.model
    _one_of("model.family", model.family, FAMILIES)
    if model.width % model.heads:
        raise ConfigError("model.heads", f"is {model.heads}, must divide model.width = {model.width}")
    if head_dim(model) % 2:
        key = "model.heads" if model.head_dim is None else "model.head_dim"
        raise ConfigError(
            key, f"gives heads of width {head_dim(model)}, which must be even for rotary positions"
        )
    if model.heads % model.kv_heads:
        raise ConfigError("model.kv_heads", f"is {model.kv_heads}, must divide model.heads = {model.heads}")
    check_experts(config)
    if model.factory is not None:
        _check_factory(config, model.factory)


def _check_factory(config: RunConfig, factory: str) -> None:
    module, colon, function = factory.partition(":")
    if not colon or not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError("model.factory", f"is {factory!r}; accepted: package.module:function, or null")
    try:
        importable = find_spec(module) is not None
    except ImportError:
        importable = False
    if not importable:
        raise ConfigError(
            "model.factory",
            f"there is no module {module} to import; install it, or name its folder in PYTHONPATH",
        )
    names = names_defined(module)
    if names is not None and function not in names:
        near = difflib.get_close_matches(function, names, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError("model.factory", f"{module} has no {function!r}{meant}")
    if config.model.family != ModelConfig.family:
        raise ConfigError(
            "model.family", f"does not go with model.factory; accepted with it: {ModelConfig.family}"
        )
    for key, accepted in {"init": "null", "tied": "false", "logit_softcap": "null", "z_loss": "0"}.items():
        if getattr(config.model, key) != getattr(ModelConfig, key):
            raise ConfigError(
                f"model.{key}", f"goes with the decoder, not with model.factory; accepted with it: {accepted}"
            )
    if config.train.recompute == "selective":
        raise ConfigError(
            "train.recompute",
            "selective goes with the decoder: of the blocks of model.factory it is not known what is cheap; "
            "accepted with it: none, full",
        )


def _check_parametrization(config: RunConfig) -> None:
    model, optimizer = config.model, config.optimizer
    if model.parametrization == "standard":
        for key in ("base_width", "base_layers", "base_head_dim"):
            if getattr(model, key) is not None:
                raise ConfigError(
                    f"model.{key}", "goes with model.parametrization: mup; accepted with standard: null"
                )
        return
    if model.base_width is None:
        raise ConfigError(
            "model.base_width", "is null, and model.parametrization is mup; accepted: at least 1"
        )
    refused: str | None
    if model.factory is not None:
        refused = "goes with the decoder, not with model.factory"
    elif model.experts:
        refused = "is not known for mixtures of experts"
    else:
        settings = check_options(optimizer.name, optimizer_options(optimizer))
        refused = growth_refusal(method_named(optimizer.name), settings)
    if refused is not None:
        raise ConfigError("model.parametrization", f"mup: {refused}; accepted with it: standard")


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
    _one_of("optimizer.name", name, (*OPTIMIZER_NAMES, "package.module:name"))
    for option in options:
        raise ConfigError(
            f"optimizer.options.{option}", f"is for an optimizer of your own; {name} takes optimizer.{option}"
        )
    try:
        check_options(name, optimizer_options(config.optimizer))
    except ValueError as error:
        raise ConfigError("optimizer", str(error)) from None


def _check_lr_schedule(config: RunConfig) -> None:
    optimizer = config.optimizer
    _one_of("optimizer.schedule", optimizer.schedule, SCHEDULES)
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


def _check_correction_options(config: RunConfig) -> None:
    name, options = config.correction.name, correction_options(config.correction)
    if name == "none":
        if options:
            raise ConfigError(
                "correction", "has settings and no name; accepted: " + ", ".join(CORRECTION_NAMES)
            )
        return
    try:
        check_correction(name, options)
    except ValueError as error:
        raise ConfigError("correction", str(error)) from None


def _check_correction(config: RunConfig) -> None:
    name = config.correction.name
    if name == "none":
        return
    settings = check_correction(name, correction_options(config.correction))
    if config.error_feedback.coefficient != 0:
        raise ConfigError("correction.name", f"{name} and error feedback do not go together; accepted: none")
    correction = CORRECTIONS[name]
    program = segment_program(config, first_step=sync_steps(config), steps=3)
    stashed = max(schedules.analyze(program).mismatch_max) == 0
    reason = refusal(name, synchronous=schedule_facts(config).synchronous, stashed=stashed)
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


def _check_compile(config: RunConfig) -> None:
    refused = compile_refusal(config) if config.train.compile else None
    if refused is not None:
        raise ConfigError("train.compile", refused)


def _check_cuda_graphs(config: RunConfig) -> None:
    refused = {
        "site.device: cpu, which has none": config.site.device == "cpu",
        "model.factory, whose code may wait for the device": config.model.factory is not None,
        "experts, whose rows depend on the tokens": config.model.experts > 0,
        "data.document_mask, whose documents depend on the tokens": config.data.document_mask,
        "model.tied with parallel.shard_head, not tried with them": has_tied_shards(config),
    }
    for what, is_so in refused.items():
        if config.train.cuda_graphs and is_so:
            raise ConfigError("train.cuda_graphs", f"does not go with {what}; accepted with it: false")


def _has_one_version_per_update(program: schedules.Program) -> bool:
    read: dict[tuple[int, int], int] = {}
    return all(
        read.setdefault((action.stage, action.microbatch // program.update_interval), action.version)
        == action.version
        for action in program.all_actions()
        if action.op is schedules.Op.FORWARD
    )


def check_data(config: RunConfig, seen: dict[str, int | DataError]) -> None:
    """Check that the data exists, has the run's hash, and fits the model's vocabulary.

    Args:
        config: the run's configuration.
        seen: see `check`.

    Raises:
        ConfigError: see `check`.
    """
    data = config.data
    _check_sources(data)
    _check_validation_sets(config)
    key = repr(data)
    if key not in seen:
        try:
            seen[key] = vocabulary(data)
        except DataError as error:
            seen[key] = error
    needed = seen[key]
    if isinstance(needed, DataError):
        raise ConfigError(needed.key, str(needed))
    if config.model.vocab_size < needed:
        what = f"the data in {where_of(data)}" if needed != BYTE_VALUES else "text read as bytes"
        raise ConfigError(
            "model.vocab_size",
            f"is {config.model.vocab_size}, {what} needs {needed} or more",
        )


_SET_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")


def _check_sources(data: DataConfig) -> None:
    if data.sources and data.path is not None:
        raise ConfigError("data.path", "does not go with data.sources; accepted with it: null")
    for name in data.weights:
        if name not in data.sources:
            raise ConfigError(f"data.weights.{name}", f"data.sources has no {name}")
    tokenizers: dict[str, str] = {}
    for name, path in data.sources.items():
        key = f"data.sources.{name}"
        if not _SET_NAME.fullmatch(name):
            raise ConfigError(
                key, "accepted as a name: up to 40 letters, digits and underscores, a letter first"
            )
        try:
            tokenizer = tokenizer_of(path)
        except (DataError, RuntimeError) as error:
            raise ConfigError(key, str(error)) from error
        if tokenizer is not None:
            tokenizers[tokenizer] = path
        if len(tokenizers) > 1:
            other = min(tokenizers.values())
            raise ConfigError(
                key, f"{path} was made with another tokenizer, or start of documents, than {other}"
            )


def _check_validation_sets(config: RunConfig) -> None:
    data, train = config.data, config.train
    trained = trained_paths(data)
    for name, path in data.validation.items():
        key = f"data.validation.{name}"
        if name == OWN_SPLIT or not _SET_NAME.fullmatch(name):
            raise ConfigError(
                key,
                "accepted as a name: up to 40 letters, digits and underscores, a letter first; not "
                f"{OWN_SPLIT}, the data's own split",
            )
        try:
            tokenizers = {tokenizer_of(each) for each in (path, *(trained.values() or (None,)))} - {None}
            whole = not is_prepared(Path(path).expanduser())
        except (DataError, RuntimeError) as error:
            raise ConfigError(key, str(error)) from error
        if len(tokenizers) > 1:
            other = "the data that is trained on"
            raise ConfigError(
                key, f"{path} was made with another tokenizer, or start of documents, than {other}"
            )
        for of_training, other in trained.items() if whole else ():
            if Path(path).resolve() == Path(other).resolve():
                raise ConfigError(key, f"{path} is trained on ({of_training}); accepted: data that is not")
    if extra := sorted(data.validation_sha256.keys() - data.validation.keys()):
        raise ConfigError(f"data.validation_sha256.{extra[0]}", f"data.validation has no {extra[0]}")
    _one_of("data.headline", data.headline, (OWN_SPLIT, *data.validation))
    if train.eval_tokens is not None and train.eval_microbatches != TrainConfig.eval_microbatches:
        raise ConfigError(
            "train.eval_microbatches",
            f"is {train.eval_microbatches}, and train.eval_tokens says how much is read; accepted: either",
        )


def _check_document_mask(config: RunConfig) -> None:
    data = config.data
    if not data.document_mask:
        if data.end_of_document is not None:
            raise ConfigError(
                "data.end_of_document", "goes with data.document_mask: true; accepted without it: null"
            )
        return
    if config.model.factory is not None:
        raise ConfigError(
            "data.document_mask",
            "goes with the decoder: the blocks of model.factory take no mask; accepted with it: false",
        )
    recorded = recorded_end_of_document(data)
    if recorded is not None and data.end_of_document is not None:
        raise ConfigError(
            "data.end_of_document",
            f"is {data.end_of_document}, and {where_of(data)} records its own, {recorded}; accepted with it: "
            "null",
        )
    if recorded is None and data.end_of_document is None:
        raise ConfigError(
            "data.document_mask",
            f"{where_of(data)} does not record which token ends a document; accepted: false, or true with "
            "data.end_of_document, or with data from `asyncpp data prepare`",
        )
    if data.end_of_document is not None and data.end_of_document >= config.model.vocab_size:
        raise ConfigError(
            "data.end_of_document",
            f"is {data.end_of_document}, must be below model.vocab_size = {config.model.vocab_size}",
        )


def _one_of(key: str, value: str, accepted: Collection[str]) -> None:
    if value not in accepted:
        raise ConfigError(key, unknown(value, accepted))


_DEPENDENT = (
    "active_experts",
    "shared_experts",
    "expert_width",
    "dense_layers",
    "router_score",
    "route_normalised",
    "route_scale",
    "balance",
    "balance_rate",
)
"""Keys of `model` that mean nothing without experts."""


def check_experts(config: RunConfig) -> None:
    """Check the keys of a mixture of experts, or that a dense model has none.

    Raises:
        ConfigError: names the first invalid key, what is wrong and what is accepted.
    """
    model = config.model
    if not model.experts:
        for key in _DEPENDENT:
            value, default = getattr(model, key), getattr(ModelConfig, key)
            if value != default:
                raise ConfigError(
                    f"model.{key}",
                    f"is {_shown(value)}, and model.experts is 0; accepted with it: {_shown(default)}",
                )
        return
    if model.factory is not None:
        raise ConfigError(
            "model.experts", "goes with the decoder, not with model.factory; accepted with it: 0"
        )
    if model.active_experts is None or model.active_experts > model.experts:
        raise ConfigError(
            "model.active_experts",
            f"is {_shown(model.active_experts)}, must be from 1 to model.experts = {model.experts}",
        )
    if model.expert_width is None:
        raise ConfigError("model.expert_width", "is null, must be at least 1")
    if model.dense_layers >= model.layers:
        raise ConfigError(
            "model.dense_layers",
            f"is {model.dense_layers}, must be below model.layers = {model.layers}, or there are no experts",
        )
    for key, accepted in (("router_score", SCORES), ("balance", BALANCES)):
        value = getattr(model, key)
        if value is not None and value not in accepted:
            raise ConfigError(
                f"model.{key}", f"{value!r} is not known; accepted: {', '.join(accepted)}, or null"
            )
    if model.balance_rate is not None and model.balance == "none":
        raise ConfigError(
            "model.balance_rate",
            f"is {model.balance_rate:g}, and model.balance is none; accepted with it: null",
        )


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


MOST_SLOTS = 100_000
"""Upper bound of stages times micro-batches in a step, the size of a step's program."""

CUSTOM_STEPS = 3
"""Steps in each of the two segments that a custom schedule is checked with."""


def check_schedule(config: RunConfig) -> None:
    """Check the keys of `schedule`, and those that depend on it.

    Raises:
        ConfigError: names the first invalid key, what is wrong and what is accepted; for a custom schedule it
            lists every problem, one per line.
    """
    name = config.schedule.name
    if schedules.is_custom(name):
        _check_size(config, config.parallel.stages)
        _check_custom_schedule(config)
    else:
        _check_size(config, schedule_facts(config).stages)
        _check_delay(config)
    try:
        for first_step in {0, sync_steps(config)}:
            segment_program(config, first_step=first_step, steps=1)
    except schedules.ScheduleError as error:
        key = "schedule.microbatches" if is_sharded(config) else "schedule"
        raise ConfigError(key, str(error)) from None
    facts = schedule_facts(config)
    stages = facts.stages
    if stages > config.model.layers:
        raise ConfigError(
            "parallel.stages",
            f"{stages} stages are asked for; the model {config.model.name} has {config.model.layers} blocks, "
            "and every stage needs one",
        )
    if is_sharded(config):
        _check_sharded(config)
    elif config.parallel.cut is not None:
        _check_cut(config.parallel.cut, config.model, stages=stages)
    if config.error_feedback.coefficient != 0 and facts.synchronous:
        raise ConfigError(
            "error_feedback", f"corrects for delay, and the schedule {name} has none; accepted with it: false"
        )
    if config.train.clip == "global" and not facts.updates_together:
        raise ConfigError(
            "train.clip",
            f"global needs a step that all stages share, and under {name} each stage updates on its own; "
            "accepted with it: stage, none",
        )
    if config.parallel.shard_head:
        check_shard_head(config)
    if config.parallel.shard_gradients:
        _check_shard_gradients(config)
    if config.model.tied and not config.parallel.shard_head:
        for first_step in {0, sync_steps(config)}:
            problem = tied_problem(segment_program(config, first_step=first_step, steps=TIED_STEPS))
            if problem is not None:
                accepted = f"false, parallel.stages: 1, or a schedule in a V ({', '.join(can_tie())})"
                raise ConfigError("model.tied", f"{problem}; accepted: {accepted}")


def _check_sharded(config: RunConfig) -> None:
    """Check what a schedule that shards the model cannot do, and its number of replicas."""
    if config.parallel.shard_head:
        raise ConfigError(
            "parallel.shard_head",
            f"gives each pipeline rank rows of the head, and under {config.schedule.name} there are none; "
            "accepted with it: false",
        )
    if config.train.cuda_graphs:
        raise ConfigError(
            "train.cuda_graphs",
            f"a graph has its weights in one place, and under {config.schedule.name} they are gathered anew; "
            "accepted with it: false",
        )
    processes = config.parallel.stages * config.parallel.data
    replicas = config.schedule.replicas
    if config.schedule.name == "hsdp" and (processes % replicas or processes == replicas):
        numbers = [number for number in range(2, processes // 2 + 1) if processes % number == 0]
        raise ConfigError(
            "schedule.replicas",
            f"is {replicas}, must divide the {processes} processes (parallel.stages x parallel.data) into "
            f"groups of two or more; accepted: {', '.join(map(str, numbers)) or 'none: choose fsdp'}",
        )


def _check_cut(cut: Sequence[float], model: ModelConfig, *, stages: int) -> None:
    smallest = 0.5 if model.factory is None else 1
    sizes = "whole or with .5" if model.factory is None else "whole, since model.factory makes whole blocks"
    is_possible = len(cut) == stages and sum(cut) == model.layers
    is_possible &= all(size >= smallest and size % smallest == 0 for size in cut[:-1])
    if not is_possible or cut[-1] < 0 or cut[-1] % smallest:
        raise ConfigError(
            "parallel.cut",
            f"is {list(cut)}; accepted: the blocks of {stages} stages, {sizes}, {model.layers} in all and at "
            f"least {smallest} each, but for the last, which may be 0: the head alone",
        )


def check_shard_head(config: RunConfig) -> None:
    """Check `parallel.shard_head` against the run's other settings.

    Raises:
        ConfigError: it is not accepted with one of them.
    """
    model, ranks = config.model, config.parallel.stages
    rule = method_named(config.optimizer.name).rule("embedding" if model.tied else "head")
    refused = {
        "needs a head that the program knows, and model.factory makes its own; accepted with it: false": (
            model.factory is not None
        ),
        f"gives each rank some of the {model.vocab_size} tokens of model.vocab_size, and there are {ranks} "
        "ranks; accepted with it: false": model.vocab_size < ranks,
        "computes the plain cross-entropy, without model.logit_softcap and model.z_loss; accepted with them: "
        "false": has_terms(model),
        "makes stages of the head's shards, and train.clip is stage; accepted with it: false": (
            config.train.clip == "stage"
        ),
        f"needs an optimizer that updates rows of the head alone, unlike {config.optimizer.name}; accepted "
        "with it: false": not rule.elementwise,
    }
    for why, is_so in refused.items():
        if is_so:
            raise ConfigError("parallel.shard_head", why)


def _check_shard_gradients(config: RunConfig) -> None:
    key, data = "parallel.shard_gradients", config.parallel.data
    if data == 1:
        raise ConfigError(key, "shards over data ranks, and parallel.data is 1; accepted with it: false")
    if has_tied_shards(config) and not schedule_facts(config).synchronous:
        raise ConfigError(
            key,
            "keeps one whole gradient, and shards that embedding and head share (model.tied, "
            "parallel.shard_head) gather those of two steps at once; accepted with them: false",
        )
    steps = 2 + config.schedule.delay
    program = segment_program(config, first_step=sync_steps(config), steps=steps)
    if max(gradient_buffers([program], data_ranks=data, on_gpu=False)) == 1:
        raise ConfigError(
            key,
            f"shards the second gradient buffer, and {config.schedule.name} has one: its backwards never run "
            "beside an update; accepted with it: false",
        )


TIED_STEPS = 3
"""Steps of the program in which the order of the ends' updates is checked."""


def can_tie() -> list[str]:
    """The schedules whose first and last stage can share a matrix."""
    return [name for name, schedule in schedules.FAMILY.items() if schedule.ends_together]


def tied_problem(program: schedules.Program) -> str | None:
    """Why embedding and head cannot share a matrix under a program; None: they can.

    One rank has to hold both, and on it the stages' updates alternate, the head's first: its gradient is then
    added to what the embedding has gathered of the same step. At least one of the embedding's backwards comes
    between the two, since a reduction that begins within the last of them needs the head's gradient.
    """
    last = program.num_stages - 1
    if last == 0:
        return None
    rank, other = program.rank_of_stage[0], program.rank_of_stage[last]
    if rank != other:
        return f"needs embedding and head on one rank, and {program.schedule} has them on {rank} and {other}"
    if not program.updates_together:
        return f"needs stages that update together, and under {program.schedule} each updates on its own"
    head = embedding = program.first_step
    followed = False
    for action in program.actions[rank]:
        in_turn = True
        if action.op is schedules.Op.UPDATE and action.stage == last:
            in_turn, head, followed = head == embedding, action.version, False
        elif action.op is schedules.Op.UPDATE and action.stage == 0:
            in_turn, embedding = followed and action.version == head, action.version
        elif action.stage == 0 and action.op is not schedules.Op.FORWARD:
            followed = True
        if not in_turn:
            return f"needs the last stage to update before the first ends its step, unlike {program.schedule}"
    return None


def _check_size(config: RunConfig, stages: int) -> None:
    microbatches = config.schedule.microbatches
    if (slots := stages * microbatches) > MOST_SLOTS:
        raise ConfigError(
            "schedule.microbatches",
            f"{microbatches} micro-batches on {stages} stages make a program of {slots:,} parts per step; "
            f"accepted: {MOST_SLOTS:,}",
        )


def _check_custom_schedule(config: RunConfig) -> None:
    """Build the programs of two consecutive segments and report every problem, one per line."""
    first_step = sync_steps(config)
    try:
        first, second = (
            segment_program(config, first_step=first_step + CUSTOM_STEPS * number, steps=CUSTOM_STEPS)
            for number in range(2)
        )
    except schedules.ScheduleError as error:
        raise ConfigError("schedule.name", f"{error}{raised_in(error, config)[1]}") from None
    problems = []
    if first.rank_of_stage != second.rank_of_stage:
        problems.append(f"places stages on ranks {first.rank_of_stage}, then on {second.rank_of_stage}")
    if len(first.initial_versions) > 1:
        problems.append(
            f"begins at step {first_step} with versions {list(first.initial_versions)}, but only the newest "
            "is there (after a synchronous start, see the option delayed_from)"
        )
    if first.final_versions != second.initial_versions:
        problems.append(
            f"a segment ends with versions {list(first.final_versions)}, and the next begins with "
            f"{list(second.initial_versions)}"
        )
    of_first = schedules.analyze(first)
    if any(
        versions > 1 and mismatch
        for versions, mismatch in zip(of_first.versions, of_first.mismatch_max, strict=True)
    ):
        problems.append(
            "has backwards at newer weights than their forwards', and keeps older versions beside these; "
            "accepted: backwards at the version of their forward, or one version"
        )
    if (first.updates_together, first.update_interval) != (second.updates_together, second.update_interval):
        problems.append("updates in another way in its second segment")
    if first_step and first.rank_of_stage != tuple(range(config.parallel.stages)):
        problems.append("sync-start needs one stage a rank, in order")
    if problems:
        raise ConfigError(
            "schedule.name", "\n".join(f"{config.schedule.name}: {problem}" for problem in problems)
        )


def _check_delay(config: RunConfig) -> None:
    schedule, stages = config.schedule, config.parallel.stages
    microbatches, delay, ahead = schedule.microbatches, schedule.delay, schedule.ahead
    if schedules.find(schedule.name).lead is None:
        return
    options = schedule_options(config)
    for name, value in options.items():
        try:
            checked({name: value})
        except schedules.ScheduleError as error:
            raise ConfigError(f"schedule.{name}", str(error)) from None
    shards = config.parallel.shard_head
    least = least_lead(schedule.name, stages=stages, shard_head=shards, **options)
    assert least is not None
    if delay * microbatches < least:
        needed, smallest = -(-least // delay), -(-least // microbatches)
        further = "" if ahead == 1 else f" and schedule.ahead = {ahead}"
        further += " and parallel.shard_head" * shards
        raise ConfigError(
            "schedule.microbatches",
            f"is {microbatches}; {schedule.name} with {stages} stages needs at least {needed} micro-batches "
            f"per step for schedule.delay = {delay}{further} (with {microbatches}, the smallest "
            f"delay is {smallest})",
        )
