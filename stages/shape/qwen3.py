"""Qwen3's decoders (arXiv 2505.09388): Llama-like, with an RMSNorm on each head's queries and keys.

The norms bound the attention logits. Heads have `model.head_dim` values, 128 in all published sizes, whatever
the model's width. Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace

from stages.config.run_config import ModelConfig
from stages.shape import llama
from stages.shape.activations import Values
from stages.shape.spec import Family, HuggingFace, PartSpec, head_dim, norm


def attention(config: ModelConfig) -> PartSpec:
    """A Llama's attention with the two norms behind its projections."""
    size = head_dim(config)
    queries = norm("attention.query_norm", size, "self_attn.q_norm", count=config.heads)
    keys = norm("attention.key_norm", size, "self_attn.k_norm", count=config.kv_heads)
    # Selective recomputation normalizes and rotates at once, from the projections' outputs.
    inner = (replace(described, kept_selectively=Values()) for described in (queries, keys))
    return sum(inner, start=llama.attention(config))


QWEN3 = Family(
    attention=attention,
    mlp=llama.mlp,
    normalized=True,
    hugging_face=HuggingFace(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        settings={"attention_bias": False, "use_sliding_window": False},
        defaults={"num_key_value_heads": 32, "use_sliding_window": False},
    ),
)
