"""The decoder's parameters: their shapes, and what the Llama of Hugging Face `transformers` calls them.

Both models compute the same from the same matrices: rotary positions turn the two halves of a head together
in either, so nothing is permuted. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.config import ModelConfig

_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def llama_names(config: ModelConfig) -> dict[str, str]:
    """By each parameter of the whole decoder, in order, its name in `transformers`."""
    names = {"embedding.weight": _OUTSIDE["embedding.weight"]}
    for block in range(config.layers):
        names |= {
            f"blocks.{block}.{ours}": f"model.layers.{block}.{llama}" for ours, llama in _IN_BLOCK.items()
        }
    return names | {name: _OUTSIDE[name] for name in ("norm.weight", "head.weight")}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of the whole decoder, in order."""
    width, hidden = config.width, config.mlp_width
    kv_width = config.kv_heads * (width // config.heads)
    in_block: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (width,),
        "attention.query.weight": (width, width),
        "attention.key.weight": (kv_width, width),
        "attention.value.weight": (kv_width, width),
        "attention.output.weight": (width, width),
        "mlp_norm.weight": (width,),
        "mlp.gate.weight": (hidden, width),
        "mlp.up.weight": (hidden, width),
        "mlp.down.weight": (width, hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, width)}
    for block in range(config.layers):
        shapes |= {f"blocks.{block}.{name}": shape for name, shape in in_block.items()}
    return shapes | {"norm.weight": (width,), "head.weight": (config.vocab_size, width)}


def llama_config(
    config: ModelConfig, *, context: int, dtype: str, end_of_document: int | None = None
) -> dict[str, Any]:
    """The content of config.json, which tells `transformers` to build this decoder.

    Args:
        config: the model.
        context: tokens in the sequences that it was trained on.
        dtype: torch's name of the weights' type.
        end_of_document: the token that ends a document, where one is known.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end_of_document,
        "head_dim": config.width // config.heads,
        "hidden_act": "silu",
        "hidden_size": config.width,
        "initializer_range": 0.02,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": context,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": config.norm_eps,
        # transformers 5 reads the first of these, earlier ones the second.
        "rope_parameters": {"rope_theta": config.rope_base, "rope_type": "default"},
        "rope_theta": config.rope_base,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


_LEFT_OUT = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}
"""What transformers' LlamaConfig takes where a config.json does not say."""


def config_differences(config: ModelConfig, content: Mapping[str, Any]) -> list[str]:
    """What a config.json says of its model that would make this decoder compute something else, in words.

    Only what the shapes of the weights do not tell. What the file leaves out is what transformers takes then.
    """
    rope = content.get("rope_parameters") or {}
    wanted: dict[str, Any] = {
        "model_type": "llama",
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    given = {key: value for key, value in content.items() if value is not None}
    said = {key: value for key, value in (_LEFT_OUT | given).items() if key in wanted}
    wanted["rope_theta"] = config.rope_base
    said["rope_theta"] = rope.get("rope_theta", given.get("rope_theta", _LEFT_OUT["rope_theta"]))
    scaling = content.get("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind is not None:
        wanted["rope_type"], said["rope_type"] = "default", kind
    return [f"{key} is {said[key]}, here {wanted[key]}" for key in said if said[key] != wanted[key]]
