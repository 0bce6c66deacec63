"""Mixtures of experts that go to `transformers` and come from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.resumed import saving
from support.single_process import whole_model
from support.small_runs import Rows, small_config, with_experts
from torch import Tensor

from stages.checkpoint.export import write_weights
from stages.checkpoint.export_options import ExportFormat, Weights
from stages.checkpoint.files import CheckpointError
from stages.checkpoint.initial_weights import InitError, check_init
from stages.checkpoint.saved_weights import SavedWeights, newest_weights
from stages.config.run_config import RunConfig
from stages.model.routing import Routing
from stages.shape.stacks import member_names
from stages.trainer import replay

GLM = {"shared_experts": 2, "dense_layers": 1, "route_scale": 1.5, "balance_rate": 0.05}
QWEN = {"router_score": "softmax", "balance": "none", "dense_layers": 1}


def trained(config: RunConfig, folder: Path) -> tuple[dict[str, Tensor], SavedWeights]:
    result = replay(saving(config), recorder=Rows(), checkpoints=folder)
    return result.weights, newest_weights(folder, config)


def config_of(family: str, experts: Mapping[str, Any]) -> RunConfig:
    config = with_experts(small_config("2bw", stages=3, layers=3, lr=3e-2), **experts)
    return replace(config, model=replace(config.model, family=family))


def our_logits(config: RunConfig, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    module = whole_model(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            members = [weights[member] for member in member_names(name, tuple(parameter.shape))]
            parameter.copy_(torch.stack(members) if parameter.ndim == 3 else members[0])
        biases = {block: weights[f"blocks.{block}.experts.bias"] for block in module.expert_blocks}
        logits: Tensor = module(tokens, Routing(biases))
    return logits


def some_tokens() -> Tensor:
    return torch.randint(256, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("family", "experts", "model_type"),
    [
        ("llama", GLM, "glm4_moe"),
        ("qwen3", {"balance_rate": 0.05, "route_normalised": False}, "glm4_moe"),
        ("qwen3", QWEN, "qwen3_moe"),
        ("qwen3", QWEN | {"route_normalised": False}, "qwen3_moe"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # shared experts where there are none
@pytest.mark.slow
def test_transformers_computes_the_same_logits_and_a_run_starts_from_the_files(
    family: str, experts: dict[str, Any], model_type: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    config = config_of(family, experts)
    weights, saved = trained(config, tmp_path / "c")
    out = tmp_path / "out"
    out.mkdir()
    write_weights(saved, config, out, format=ExportFormat.HF, weights=Weights.MASTER, shard_bytes=20_000)
    assert len(list(out.glob("*.safetensors"))) > 1
    biased = any(tensor.any() for name, tensor in weights.items() if name.endswith(".experts.bias"))
    assert biased is (model_type == "glm4_moe")
    theirs, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert theirs.config.model_type == model_type
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    with torch.no_grad():
        logits = our_logits(config, weights, some_tokens())
        assert logits.std() > 0.1
        torch.testing.assert_close(theirs(some_tokens()).logits, logits, rtol=0, atol=1e-5)
    again = replace(
        config,
        model=replace(config.model, init=str(out), balance="none"),
        optimizer=replace(config.optimizer, lr=1e-30, weight_decay=0.0),
        parallel=replace(config.parallel, data=2, stages=2),
        seed=7,
    )
    started, _ = trained(again, tmp_path / "again")
    assert started.keys() == weights.keys()
    assert all(torch.equal(started[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_moe"])
@pytest.mark.slow
def test_a_mixture_of_transformers_is_a_start(model_type: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = config_of("qwen3", GLM if model_type == "glm4_moe" else QWEN)
    config.model.head_dim = 6
    settings = {"num_experts": 6} if model_type == "qwen3_moe" else {"n_routed_experts": 6}
    if model_type == "glm4_moe":
        settings |= {"n_shared_experts": 2, "use_qk_norm": True, "routed_scaling_factor": 1.5}
        rotation = {"rope_theta": 1e4, "partial_rotary_factor": 1.0}
        settings |= {"rope_parameters": {**rotation, "rope_type": "default"}, **rotation}
    else:
        settings |= {"norm_topk_prob": True, "mlp_only_layers": [0]}
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(
            model_type,
            vocab_size=256,
            hidden_size=16,
            intermediate_size=24,
            moe_intermediate_size=12,
            num_experts_per_tok=2,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=6,
            rms_norm_eps=1e-5,
            **settings,
        )
    )
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            assert "inv_freq" not in name
            tensor += 0.1 * torch.randn_like(tensor)  # gains of norms and balance biases, too
    theirs.save_pretrained(tmp_path / "theirs")
    config.model.init = str(tmp_path / "theirs")
    config.optimizer.lr, config.optimizer.weight_decay = 1e-30, 0.0
    started, _ = trained(
        replace(config, model=replace(config.model, balance="none", balance_rate=None)), tmp_path / "c"
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        logits = our_logits(config, started, some_tokens())
        torch.testing.assert_close(logits, theirs(some_tokens()).logits, rtol=0, atol=1e-5)
    with pytest.raises(InitError, match=r"num_experts_per_tok is 2, here 3"):
        check_init(replace(config.model, active_experts=3))
    with pytest.raises(InitError, match=r"mlp.gate.weight is \[6, 16\], the model tiny has \[7, 16\]"):
        check_init(replace(config.model, experts=7))


def test_models_that_transformers_cannot_represent_are_refused(tmp_path: Path) -> None:
    config = config_of("qwen3", {"router_score": "softmax", "balance_rate": 0.05})
    weights, saved = trained(config, tmp_path / "c")
    options: dict[str, Any] = {"format": ExportFormat.HF, "weights": Weights.MASTER}
    with pytest.raises(CheckpointError, match=r"experts\.bias is not 0.*accepted: --format safetensors"):
        write_weights(saved, config, tmp_path, **options)
    llama = replace(config, model=replace(config.model, family="llama"))
    with pytest.raises(
        CheckpointError, match=r"no mixture with model.router_score: softmax and model.family: llama"
    ):
        write_weights(saved, llama, tmp_path, **options)
    own = tmp_path / "own"
    own.mkdir()
    write_weights(saved, config, own, format=ExportFormat.SAFETENSORS, weights=Weights.MASTER)
    written = load_file(own / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in weights.items())
    check_init(replace(config.model, init=str(own)))
