"""Qwen3's dense decoders (arXiv 2505.09388): Llama-like, with an RMSNorm on each head's queries and keys.

The norms bound the attention logits. Heads have `model.head_dim` values, 128 in all published sizes, whatever
the model's width. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.config import ModelConfig
from stages.model.families.llama import attention, mlp
from stages.model.spec import Family, HuggingFace, PartSpec, head_dim, norm

if TYPE_CHECKING:
    from stages.model.layers import Block


def block_spec(config: ModelConfig) -> PartSpec:
    """One block: a Llama's, with the two norms behind its projections."""
    size = head_dim(config)
    queries = norm("attention.query_norm", size, "self_attn.q_norm", count=config.heads)
    keys = norm("attention.key_norm", size, "self_attn.k_norm", count=config.kv_heads)
    return attention(config) + queries + keys + mlp(config)


def make_block(config: ModelConfig) -> Block:
    """The module of one block."""
    from stages.model.layers import MLP, Attention, Block

    return Block(config, attention=Attention(config, normalized=True), mlp=MLP(config))


QWEN3 = Family(
    block_spec=block_spec,
    make_block=make_block,
    hugging_face=HuggingFace(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        settings={"attention_bias": False, "use_sliding_window": False},
    ),
)
