"""The classes of Hugging Face transformers that compute a mixture of experts as it is here. Imports no torch.

With sigmoid scores it is `glm4_moe`, which has the balance bias and shared experts, and normalizes queries
and keys where it is told to. With softmax scores it is `qwen3_moe`: it has neither, and always normalizes.
"""

from __future__ import annotations

from collections.abc import Mapping

from stages.config.run_config import ModelConfig
from stages.shape.moe import Mixture, has_experts, mixture_of
from stages.shape.spec import HuggingFace


class NoClassError(ValueError):
    """No class of transformers computes the same; says what it lacks."""


def mixture_class(config: ModelConfig, *, normalized: bool) -> HuggingFace:
    """The class for a model with experts.

    Args:
        config: the model.
        normalized: whether queries and keys are normalized by head.

    Raises:
        NoClassError: there is none.
    """
    mixture = mixture_of(config)
    assert mixture is not None
    if mixture.score == "sigmoid":
        return _glm(mixture, normalized=normalized)
    for lacking, key in (
        (not normalized, "model.family: llama"),
        (mixture.shared_width > 0, "model.shared_experts"),
        (mixture.scale != 1, "model.route_scale"),
    ):
        if lacking:
            raise NoClassError(f"transformers has no mixture with model.router_score: softmax and {key}")
    return HuggingFace(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        settings={
            "attention_bias": False,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(mixture.dense_layers)),
            "num_experts_per_tok": mixture.active,
            "norm_topk_prob": mixture.normalised,
        },
        metadata={
            "num_experts": mixture.experts,
            "moe_intermediate_size": mixture.width,
            "router_aux_loss_coef": 0.0,
        },
        defaults={
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
    )


def _glm(mixture: Mixture, *, normalized: bool) -> HuggingFace:
    return HuggingFace(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        settings={
            "attention_bias": False,
            "use_qk_norm": normalized,
            "num_experts_per_tok": mixture.active,
            "norm_topk_prob": mixture.normalised,
            "routed_scaling_factor": mixture.scale,
            "first_k_dense_replace": mixture.dense_layers,
            "n_group": 1,
            "topk_group": 1,
        },
        metadata={
            "n_routed_experts": mixture.experts,
            "n_shared_experts": mixture.shared_width // mixture.width,
            "moe_intermediate_size": mixture.width,
            "num_nextn_predict_layers": 0,
        },
        defaults={
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "use_qk_norm": False,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        rotary_share=0.5,
        has_bias=True,
    )


def empty_weights(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Shapes of weights without values, by name: `glm4_moe` has shared experts even where there are none."""
    mixture = mixture_of(config)
    if mixture is None or mixture.score != "sigmoid" or mixture.shared_width:
        return {}
    shapes = {"gate": (0, config.width), "up": (0, config.width), "down": (config.width, 0)}
    return {
        f"model.layers.{block}.mlp.shared_experts.{name}_proj.weight": shape
        for block in range(config.layers)
        if has_experts(config, block)
        for name, shape in shapes.items()
    }
