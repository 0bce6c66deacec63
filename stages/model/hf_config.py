"""The config.json by which Hugging Face transformers builds the same decoder. Imports no torch.

Both compute the same from the same matrices: rotary positions turn the two halves of a head together in
either, so no weight is permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.config import ModelConfig
from stages.model.families.catalogue import FAMILIES
from stages.model.moe.hugging_face import mixture_class
from stages.model.spec import HuggingFace, head_dim


def hf_config(
    config: ModelConfig, *, context: int, dtype: str, end_of_document: int | None = None
) -> dict[str, Any]:
    """The content of config.json.

    Args:
        config: the model.
        context: tokens in the sequences that it was trained on.
        dtype: torch's name of the weights' type.
        end_of_document: the token that ends a document, where one is known.

    Raises:
        NoClassError: transformers has no class for this mixture of experts.
    """
    hugging_face = hugging_face_of(config)
    rope: dict[str, Any] = {"rope_theta": config.rope_base, "rope_type": "default"}
    if hugging_face.rotary_share != 1:
        rope["partial_rotary_factor"] = 1.0
    return {
        "architectures": [hugging_face.architecture],
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end_of_document,
        "head_dim": head_dim(config),
        "hidden_act": "silu",
        "hidden_size": config.width,
        "initializer_range": 0.02,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": context,
        "model_type": hugging_face.model_type,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        # transformers 5 reads the first of these, earlier versions the second.
        "rope_parameters": rope,
        "rope_theta": config.rope_base,
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
        NoClassError: there is none for this mixture of experts.
    """
    family = FAMILIES[config.family]
    if not config.experts:
        return family.hugging_face
    return mixture_class(config, normalized=family.normalized)


_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
"""Values that the configuration classes of transformers take where a config.json leaves them out."""


def config_differences(config: ModelConfig, content: Mapping[str, Any]) -> list[str]:
    """Settings of a config.json that would make this decoder compute something else, in words.

    Only those that the shapes of the weights do not tell. What the file leaves out has transformers' default.

    Raises:
        NoClassError: transformers has no class for this mixture of experts.
    """
    hugging_face = hugging_face_of(config)
    rope = content.get("rope_parameters") or {}
    expected: dict[str, Any] = {
        "model_type": hugging_face.model_type,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        **hugging_face.settings,
    }
    if config.tied and not content.get("tie_word_embeddings", True):
        return ["tie_word_embeddings is False, here True"]
    given = {key: value for key, value in content.items() if value is not None}
    stated = {
        key: value
        for key, value in {**_DEFAULTS, **hugging_face.defaults, **given}.items()
        if key in expected
    }
    expected["rope_theta"] = config.rope_base
    stated["rope_theta"] = rope.get("rope_theta", given.get("rope_theta", _DEFAULTS["rope_theta"]))
    expected["partial_rotary_factor"] = 1.0
    stated["partial_rotary_factor"] = rope.get(
        "partial_rotary_factor", given.get("partial_rotary_factor", hugging_face.rotary_share)
    )
    scaling = content.get("rope_scaling") or rope
    rope_type = scaling.get("rope_type", scaling.get("type"))
    if rope_type is not None:
        expected["rope_type"], stated["rope_type"] = "default", rope_type
    return [f"{key} is {stated[key]}, here {expected[key]}" for key in stated if stated[key] != expected[key]]
