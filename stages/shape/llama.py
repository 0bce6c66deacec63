"""Llama-like decoders: RMSNorm, rotary positions, grouped-query attention, SwiGLU. Imports no torch."""

from __future__ import annotations

from stages.config.run_config import ModelConfig
from stages.shape.activations import CheapPart, Values
from stages.shape.spec import Family, HuggingFace, PartSpec, head_dim, matrix, norm


def attention(config: ModelConfig) -> PartSpec:
    """Attention behind its norm."""
    width, queries, keys = config.width, config.heads * head_dim(config), config.kv_heads * head_dim(config)
    projections = PartSpec(
        parameters=(
            matrix("attention.query", queries, width, "self_attn.q_proj"),
            matrix("attention.key", keys, width, "self_attn.k_proj"),
            matrix("attention.value", keys, width, "self_attn.v_proj"),
            matrix("attention.output", width, queries, "self_attn.o_proj"),
        ),
        multiply_adds=2 * width * queries + 2 * width * keys,
        attention=queries,
        # The norm's output; queries, keys, values and what attention returns; each head's sum of the softmax.
        kept=Values(narrow=width + 2 * queries + 2 * keys, wide=config.heads),
        # Queries and keys before they are rotated.
        kept_selectively=Values(narrow=2 * queries + 2 * keys, wide=config.heads),
        cheap=(CheapPart(made=Values(narrow=queries)), CheapPart(made=Values(narrow=keys))),
        deferred=Values(narrow=(width + queries) + (queries + 2 * keys + width)),
    )
    return norm("attention_norm", width, "input_layernorm") + projections


def mlp(config: ModelConfig) -> PartSpec:
    """SwiGLU behind its norm."""
    width, hidden = config.width, config.mlp_width
    matrices = PartSpec(
        parameters=(
            matrix("mlp.gate", hidden, width, "mlp.gate_proj"),
            matrix("mlp.up", hidden, width, "mlp.up_proj"),
            matrix("mlp.down", width, hidden, "mlp.down_proj"),
        ),
        multiply_adds=3 * width * hidden,
        # The norm's output; gate, its SiLU, up, and their product.
        kept=Values(narrow=width + 4 * hidden),
        kept_selectively=Values(narrow=2 * hidden),
        cheap=(CheapPart(made=Values(narrow=2 * hidden)),),
        deferred=Values(narrow=(width + hidden) + (2 * hidden + width)),
        passing=Values(narrow=4 * hidden),
    )
    return norm("mlp_norm", width, "post_attention_layernorm") + matrices


LLAMA = Family(
    attention=attention,
    mlp=mlp,
    hugging_face=HuggingFace(
        model_type="llama",
        architecture="LlamaForCausalLM",
        settings={"attention_bias": False, "mlp_bias": False},
        defaults={"mlp_bias": False},
        metadata={"pretraining_tp": 1},
    ),
)
