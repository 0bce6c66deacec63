"""Checks of a configuration's model. Imports no torch."""

from __future__ import annotations

import difflib
from importlib.util import find_spec
from typing import Any

from optimizers import check_options, method_named
from optimizers.growth import growth_refusal
from stages.config.limits import ConfigError
from stages.config.own_code import names_defined
from stages.config.run_config import ModelConfig, RunConfig, optimizer_options
from stages.shape.spec import head_dim


def check_model(config: RunConfig) -> None:
    """Check the sizes of the model against each other, its experts, factory and parametrization.

    Raises:
        ConfigError: names the first invalid key, what is wrong and what is accepted.
    """
    model = config.model
    if model.width % model.heads:
        raise ConfigError("model.heads", f"is {model.heads}, must divide model.width = {model.width}")
    if head_dim(model) % 2:
        key = "model.heads" if model.head_dim is None else "model.head_dim"
        raise ConfigError(
            key, f"gives heads of width {head_dim(model)}, which must be even for rotary positions"
        )
    if model.heads % model.kv_heads:
        raise ConfigError("model.kv_heads", f"is {model.kv_heads}, must divide model.heads = {model.heads}")
    _check_experts(config)
    if model.factory is not None:
        _check_factory(config, model.factory)
    _check_parametrization(config)


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
    """Check the sizes of the base model, and that optimizer and model go with mup."""
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


def _check_experts(config: RunConfig) -> None:
    """Check the keys of a mixture of experts, or that a dense model has none."""
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
    if model.balance_rate is not None and model.balance == "none":
        raise ConfigError(
            "model.balance_rate",
            f"is {model.balance_rate:g}, and model.balance is none; accepted with it: null",
        )


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
