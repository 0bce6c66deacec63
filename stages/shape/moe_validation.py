"""Validation of a mixture of experts. Imports no torch."""

from __future__ import annotations

from typing import Any

from stages.config.limits import ConfigError
from stages.config.run_config import ModelConfig, RunConfig
from stages.shape.moe_settings import BALANCES, SCORES

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
                accepted = "null" if default is None else default
                raise ConfigError(
                    f"model.{key}",
                    f"is {_shown(value)}, and model.experts is 0; accepted with it: {accepted}",
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
