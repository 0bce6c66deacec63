"""The config.json by which Hugging Face transformers builds the same decoder. Imports no torch.

Both compute the same from the same matrices: rotary positions turn the two halves of a head together in
either, so no weight is permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.config.run_config import ModelConfig
from stages.shape.families import FAMILIES
from stages.shape.moe_hugging_face import NoClassError, mixture_class
from stages.shape.spec import HuggingFace, head_dim


def hf_config(
    config: ModelConfig,
    *,
    context: int,
    dtype: str,
    start_of_document: int | None = None,
    end_of_document: int | None = None,
) -> dict[str, Any]:
    """The content of config.json.

    Args:
        config: the model.
        context: tokens in the sequences that it was trained on.
        dtype: torch's name of the weights' type.
        start_of_document: the token that begins a document, where there is one.
        end_of_document: the token that ends a document, where one is known.

    Raises:
        NoClassError: transformers has no class for this mixture of experts.
    """
    hugging_face = hugging_face_of(config)
    rotation = {"partial_rotary_factor": 1.0, "rope_theta": config.rope_base}
    return {
        "architectures": [hugging_face.architecture],
        "attention_dropout": 0.0,
        "bos_token_id": start_of_document,
        "eos_token_id": end_of_document,
        "head_dim": head_dim(config),
        "hidden_act": "silu",
        "hidden_size": config.width,
        "initializer_range": config.init_std,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": context,
        "model_type": hugging_face.model_type,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        # transformers 5 reads the first of these, earlier versions the others.
        "rope_parameters": {**rotation, "rope_type": "default"},
        **rotation,
        "tie_word_embeddings": config.tied,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
        **hugging_face.settings,
        **hugging_face.metadata,
    }


def hugging_face_of(config: ModelConfig) -> HuggingFace:
    """The class of transformers that computes the same.

    Raises:
        NoClassError: there is none for this mixture of experts, or with `logit_softcap`.
    """
    if config.logit_softcap is not None:
        raise NoClassError("transformers has no Llama or Qwen3 with model.logit_softcap")
    family = FAMILIES[config.family]
    if not config.experts:
        return family.hugging_face
    return mixture_class(config, normalized=family.normalized)


_DEFAULTS = {
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_theta": 10000.0,
}
"""Values that the configuration classes of transformers take where a config.json leaves them out, unless
`HuggingFace.defaults` has another one."""


def family_difference(config: ModelConfig, content: Mapping[str, Any]) -> str | None:
    """What a config.json says of its class of models, in words, if it is another one than this decoder's.

    Raises:
        NoClassError: transformers has no class for this mixture of experts.
    """
    stated, expected = content.get("model_type"), hugging_face_of(config).model_type
    if stated in (None, expected):
        return None
    experts = " with experts" if config.experts else ""
    return f"model_type is {stated}, and model.family: {config.family}{experts} is {expected}"


def default_settings(hugging_face: HuggingFace, content: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that the computation depends on, as transformers' class has them where `content` has none."""
    heads = content.get("num_attention_heads", hugging_face.defaults.get("num_attention_heads", 32))
    return {**_DEFAULTS, "num_key_value_heads": heads, **hugging_face.defaults}


def config_differences(config: ModelConfig, content: Mapping[str, Any]) -> list[str]:
    """Settings of a config.json that would make this decoder compute something else, in words.

    Only those that the shapes of the weights do not tell. What the file leaves out has transformers' default.

    Raises:
        NoClassError: transformers has no class for this mixture of experts.
    """
    hugging_face = hugging_face_of(config)
    if content.get("per_layer_config"):
        return ["per_layer_config is given; accepted: none"]
    rotation, wrong = _rotation(content)
    if wrong:
        return [wrong]
    expected: dict[str, Any] = {
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        **hugging_face.settings,
    }
    if config.tied and not content.get("tie_word_embeddings", True):
        return ["tie_word_embeddings is False, here True"]
    given = {key: value for key, value in content.items() if value is not None} | rotation
    expected |= {"rope_theta": config.rope_base, "partial_rotary_factor": 1.0}
    defaults = default_settings(hugging_face, given) | {"partial_rotary_factor": hugging_face.rotary_share}
    stated = {key: value for key, value in {**defaults, **given}.items() if key in expected}
    return [
        f"{key} is {value}, here {expected[key]}"
        if key in given
        else f"{key} is left out, which is {value} in {hugging_face.architecture}, here {expected[key]}"
        for key, value in stated.items()
        if value != expected[key]
    ]


def _rotation(content: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """What a config.json says of rotary positions, from every place that a version of transformers reads.

    transformers 5 takes `rope_scaling`, else `rope_parameters`, and from the top level what is not in it;
    earlier versions take base and share from the top level.

    Returns:
        `rope_theta` and `partial_rotary_factor` as far as they are stated, and what is wrong, in words.
    """
    places = {key: content.get(key) or {} for key in ("rope_scaling", "rope_parameters")}
    for key, place in places.items():
        if not isinstance(place, Mapping):
            return {}, f"{key} is {place!r}; accepted: an object"
        for name in ("rope_type", "type"):
            if place.get(name, "default") != "default":
                return {}, f"rope_type is {place[name]}, here default"
        if unknown := sorted(place.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}):
            return {}, f"{key} has {unknown[0]}; accepted: rope_type, rope_theta, partial_rotary_factor"
    scaling, parameters = places.values()
    if scaling and parameters and scaling != parameters:
        return {}, "rope_scaling is another than rope_parameters; accepted: one of them"
    rotation = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        for where, place in places.items():
            if key in place:
                rotation[key] = place[key]
                if content.get(key) not in (None, place[key]):  # versions would compute different things
                    return {}, f"{key} is {content[key]}, and {place[key]} in {where}"
    return rotation, None
