"""Weights that go to `transformers` and come from there are the run's, and it computes the same with them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.resumed import saving
from support.single_process import whole_model
from support.small_runs import Rows, small_config, with_experts
from support.training_cases import named
from torch import Tensor

from stages.checkpoint.export import write_weights
from stages.checkpoint.export_options import ExportFormat, Weights
from stages.checkpoint.files import CheckpointError
from stages.checkpoint.initial_weights import INDEX_FILE, InitError, check_init
from stages.checkpoint.saved_weights import SavedWeights, newest_weights
from stages.config.run_config import CorrectionConfig, ModelConfig, RunConfig, changed
from stages.model.experts import Routing
from stages.shape.families import FAMILIES, describe
from stages.shape.hf_config import config_differences, default_settings, hf_config, hugging_face_of
from stages.shape.spec import member_names
from stages.trainer import replay

Named = dict[str, Tensor]
GLM = {"shared_experts": 2, "dense_layers": 1, "route_scale": 1.5, "balance_rate": 0.05}
QWEN = {"router_score": "softmax", "balance": "none", "dense_layers": 1}
MUP = {"parametrization": "mup", "base_width": 12, "base_layers": 2, "base_head_dim": 3}


def trained(config: RunConfig, folder: Path) -> tuple[Named, SavedWeights]:
    result = replay(saving(config), recorder=Rows(), checkpoints=folder)
    return result.weights, newest_weights(folder, config)


def exported(saved: SavedWeights, config: RunConfig, folder: Path, **options: Any) -> Named:
    """The tensors of all files written."""
    settings: dict[str, Any] = {"format": ExportFormat.SAFETENSORS, "weights": Weights.MASTER} | options
    folder.mkdir()
    write_weights(saved, config, folder, **settings)
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def started(
    config: RunConfig, init: Path, folder: Path, *, precision: str = "float32", **parallel: int
) -> Named:
    """The weights of a run that starts from files, and learns next to nothing."""
    model = replace(config.model, init=str(init))
    if model.experts:
        model = replace(model, balance="none", balance_rate=None)
    again = replace(
        config,
        model=model,
        optimizer=replace(config.optimizer, lr=1e-30, weight_decay=0.0),
        parallel=replace(config.parallel, **parallel),
        train=replace(config.train, precision=precision),
        seed=7,
    )
    weights, _ = trained(again, folder)
    return weights


@torch.no_grad()
def check_logits(theirs: torch.nn.Module, config: RunConfig, weights: Mapping[str, Tensor]) -> None:
    """A model of transformers computes what ours does."""
    module = whole_model(config, dtype=torch.float32)
    for name, parameter in module.named_parameters():
        members = [weights[member] for member in member_names(name, tuple(parameter.shape))]
        parameter.copy_(torch.stack(members) if parameter.ndim == 3 else members[0])
    tokens = torch.randint(256, (3, config.data.context), generator=torch.Generator().manual_seed(1))
    routing = Routing({block: weights[f"blocks.{block}.experts.bias"] for block in module.expert_blocks})
    logits = module(tokens, routing if config.model.experts else None)
    assert logits.std() > 0.1
    torch.testing.assert_close(theirs(tokens).logits, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        {"schedule": "1f1b", "stages": 1},
        {"schedule": "interleaved-1f1b", "precision": "float64"},
        {"schedule": "2bw", "stages": 4, "coefficient": 1.0, "precision": "bfloat16"},
        {"schedule": "2bw", "data": 2, "coefficient": 1.0, "form": "buffered"},
        {"schedule": "2bw-v", "data": 2, "precision": "bfloat16"},
        {"schedule": "paci", "correction": "discrepancy"},
        {"schedule": "pipedream", "stages": 3, "data": 2, "correction": "weight-prediction"},
    ],
    ids=named,
)
@pytest.mark.slow
def test_master_weights_are_those_that_are_evaluated(case: dict[str, Any], tmp_path: Path) -> None:
    correction = CorrectionConfig(name=case.get("correction", "none"))
    config = small_config(microbatches=4, **{key: case[key] for key in case if key != "correction"})
    weights, saved = trained(replace(config, correction=correction), tmp_path / "c")
    written = exported(saved, config, tmp_path / "out")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in weights.items())
    for parameter in describe(config.model).whole():
        assert tuple(written[parameter.name].shape) == parameter.shape


@pytest.mark.slow
def test_working_weights_are_the_newest_replica(tmp_path: Path) -> None:
    config = small_config("2bw", coefficient=1.0, precision="bfloat16")
    weights, saved = trained(config, tmp_path / "c")
    written = exported(saved, config, tmp_path / "out", weights=Weights.WORKING)
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    # Error feedback computes with y + c (y - y before): not far from y, and not y.
    for name, tensor in weights.items():
        if tensor.ndim == 2:
            assert not torch.equal(written[name], tensor.bfloat16())
            torch.testing.assert_close(written[name].float(), tensor, rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("model_type", "family", "settings"),
    [
        ("llama", "llama", {}),
        ("llama", "llama", {"heads": 2, "norm_eps": 1e-3, "rope_base": 500.0, "tied": True, **MUP}),
        ("llama", "llama", {"head_dim": 6, **MUP}),
        ("qwen3", "qwen3", {"head_dim": 6, "norm_eps": 1e-3, "rope_base": 1e6, "tied": True}),
        ("qwen3", "qwen3", MUP),
        ("glm4_moe", "llama", GLM),
        ("glm4_moe", "qwen3", {"balance_rate": 0.05, "route_normalised": False}),
        ("qwen3_moe", "qwen3", QWEN),
        ("qwen3_moe", "qwen3", QWEN | {"route_normalised": False}),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # shared experts where there are none
@pytest.mark.slow
def test_transformers_computes_the_same_logits_and_a_run_starts_from_the_files(
    model_type: str, family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    tied, mixture = settings.get("tied", False), model_type.endswith("moe")
    shape = {"schedule": "2bw-v"} if tied else {"schedule": "2bw", "stages": 3, "layers": 3}
    config = small_config(microbatches=4, lr=3e-2, **shape)
    config = with_experts(config) if mixture else config
    config = replace(config, model=replace(config.model, family=family, **settings))
    weights, saved = trained(config, tmp_path / "c")
    written = exported(saved, config, tmp_path / "out", format=ExportFormat.HF, shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    assert index["weight_map"].keys() == written.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
    by_file = [load_file(tmp_path / "out" / file) for file in set(index["weight_map"].values())]
    assert len(by_file) > 2
    assert max(sum(tensor.nbytes for tensor in file.values()) for file in by_file) <= 20_000
    assert ("lm_head.weight" in written) is not tied
    biased = any(tensor.any() for name, tensor in weights.items() if name.endswith(".experts.bias"))
    assert biased is (model_type == "glm4_moe")
    theirs, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert (theirs.config.model_type, theirs.config.tie_word_embeddings) == (model_type, tied)
    assert theirs.config.max_position_embeddings == config.data.context
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (None, None)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    check_logits(theirs, config, weights)
    layout = {"stages": 2, "data": 2}
    again = started(config, tmp_path / "out", tmp_path / "again", precision="bfloat16", **layout)
    assert again.keys() == weights.keys()
    for name, tensor in weights.items():
        # Under mup, up to one rounding of a factor.
        torch.testing.assert_close(again[name], tensor, rtol=2e-7 if "base_width" in settings else 0, atol=0)


@pytest.mark.parametrize("model_type", [*FAMILIES, "glm4_moe", "qwen3_moe"])
@pytest.mark.slow
def test_a_model_of_transformers_is_a_start_even_with_a_tied_head(model_type: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    mixture = model_type.endswith("moe")
    config = small_config("2bw", stages=3, layers=3, family="qwen3" if mixture else model_type)
    config = changed(config, {"model.head_dim": 6})
    settings: dict[str, Any] = {}
    if model_type == "glm4_moe":
        config = with_experts(config, **GLM)
        settings = {"n_routed_experts": 6, "n_shared_experts": 2, "routed_scaling_factor": 1.5}
        rotation = {"rope_theta": 1e4, "partial_rotary_factor": 1.0}
        settings |= {"use_qk_norm": True, "rope_parameters": {**rotation, "rope_type": "default"}, **rotation}
    elif model_type == "qwen3_moe":
        config = with_experts(config, **QWEN)
        settings = {"num_experts": 6, "norm_topk_prob": True, "mlp_only_layers": [0]}
    if mixture:
        settings |= {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(
            model_type,
            vocab_size=256,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=6,
            rms_norm_eps=1e-5,
            tie_word_embeddings=not mixture,
            **settings,
        )
    )
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            assert "inv_freq" not in name
            if not (name == "lm_head.weight" and not mixture):  # that of the embedding
                tensor += 0.1 * torch.randn_like(tensor)  # gains of norms and balance biases, too
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    weights = started(config, tmp_path / "theirs", tmp_path / "c")
    check_logits(theirs, config, weights)
    config = changed(config, {"model.init": str(tmp_path / "theirs")})
    if mixture:
        with pytest.raises(InitError, match=r"num_experts_per_tok is 2, here 3"):
            check_init(replace(config.model, active_experts=3))
        with pytest.raises(InitError, match=r"mlp.gate.weight is \[6, 16\], the model tiny has \[7, 16\]"):
            check_init(replace(config.model, experts=7))
        return
    assert torch.equal(weights["head.weight"], weights["embedding.weight"])
    tied = replace(
        config, model=replace(config.model, tied=True), parallel=replace(config.parallel, stages=1)
    )
    tied_weights = started(tied, tmp_path / "theirs", tmp_path / "tied")
    assert tied_weights.keys() == weights.keys() - {"head.weight"}
    check_logits(theirs, tied, tied_weights)
    with pytest.raises(ValueError, match=r"rope_theta is 10000\.0, here 500"):
        check_init(replace(config.model, rope_base=500.0))
    with pytest.raises(InitError):
        check_init(replace(config.model, family=next(name for name in FAMILIES if name != model_type)))


def test_models_that_transformers_cannot_represent_are_refused(tmp_path: Path) -> None:
    capped = small_config(steps=1, **{"model.logit_softcap": 30.0})
    biased = with_experts(small_config("2bw"), router_score="softmax", balance_rate=0.05)
    biased = changed(biased, {"model.family": "qwen3"})
    for number, (config, says) in enumerate(
        (
            (capped, r"logit_softcap; accepted for it: --format safetensors"),
            (biased, r"experts\.bias is not 0.*accepted: --format safetensors"),
        )
    ):
        weights, saved = trained(config, tmp_path / f"c{number}")
        with pytest.raises(CheckpointError, match=says):
            exported(saved, config, tmp_path / f"hf{number}", format=ExportFormat.HF)
        written = exported(saved, config, tmp_path / f"own{number}")
        assert written.keys() == weights.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in weights.items())
        check_init(replace(config.model, init=str(tmp_path / f"own{number}")))
    llama = replace(biased, model=replace(biased.model, family="llama"))
    says = r"no mixture with model.router_score: softmax and model.family: llama"
    with pytest.raises(CheckpointError, match=says):
        exported(saved, llama, tmp_path / "llama", format=ExportFormat.HF)


@pytest.mark.parametrize(
    ("family", "experts"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("llama", {"router_score": "sigmoid"}),
        ("qwen3", {"router_score": "sigmoid"}),
        ("qwen3", {"router_score": "softmax", "balance": "none"}),
    ],
)
def test_keys_missing_in_a_config_have_the_defaults_of_transformers(
    family: str, experts: dict[str, Any]
) -> None:
    from transformers import AutoConfig

    given = ModelConfig(name="m", layers=2, width=16, heads=4, kv_heads=4, mlp_width=24, family=family)
    if experts:
        given = replace(given, experts=4, active_experts=2, expert_width=8, **experts)
    ours = hugging_face_of(given)
    theirs = AutoConfig.for_model(ours.model_type)
    defaults = default_settings(ours, {})
    for key in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "hidden_act", *ours.settings):
        assert defaults[key] == getattr(theirs, key), key
    # transformers 5 has them in `rope_parameters`, earlier versions beside them.
    rotation = getattr(theirs, "rope_parameters", None) or vars(theirs)
    assert defaults["rope_theta"] == rotation["rope_theta"]
    assert ours.rotary_share == rotation.get("partial_rotary_factor", 1.0)
    written = hf_config(given, context=8, dtype="float32")
    assert not config_differences(given, written)
    rotation = {key: written[key] for key in ("rope_theta", "partial_rotary_factor")}
    assert written["rope_parameters"] == {"rope_type": "default", **rotation}
    differing = config_differences(given, {})
    assert all(" is left out, which is " in difference for difference in differing)
    assert any(difference.startswith("rms_norm_eps") for difference in differing) == (
        theirs.rms_norm_eps != given.norm_eps
    )


PLACES: list[dict[str, Any] | None] = [
    None,
    {},
    {"type": "default"},
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_theta": 300},
    {"partial_rotary_factor": 1.0, "rope_theta": 500},
    {"partial_rotary_factor": 0.5},
]


READS_BASES = pytest.mark.skipif(
    int(version("transformers").partition(".")[0]) < 5, reason="before 5 transformers reads no base there"
)


@READS_BASES
@pytest.mark.parametrize(
    ("family", "experts"), [("llama", {}), ("qwen3", {}), ("llama", GLM), ("qwen3", QWEN)]
)
def test_rotary_positions_are_read_from_every_place_that_transformers_reads(
    family: str, experts: dict[str, Any]
) -> None:
    """A `rope_theta` in `rope_scaling` was not read, and 10,000 was accepted in its place."""
    from transformers import AutoConfig

    config = small_config(family=family)
    given = (with_experts(config, **experts) if experts else config).model
    plain = hf_config(given, context=8, dtype="float32")
    for key in ("rope_parameters", "rope_theta", "partial_rotary_factor"):
        del plain[key]
    accepted = 0
    for scaling, parameters, theta, share in product(PLACES, PLACES, (None, 500.0), (None, 0.5, 1.0)):
        places = {"rope_scaling": scaling, "rope_parameters": parameters}
        beside = {"rope_theta": theta, "partial_rotary_factor": share}
        content = plain | {key: value for key, value in (places | beside).items() if value is not None}
        theirs = AutoConfig.for_model(**copy.deepcopy(content)).rope_parameters
        read = {
            base
            for base in (300.0, 500.0, 10000.0)
            if not config_differences(replace(given, rope_base=base), content)
        }
        assert read <= {theirs["rope_theta"]}, content
        assert not read or theirs.get("partial_rotary_factor", 1.0) == 1.0, content
        accepted += len(read)
        if sum(place is not None for place in (scaling, parameters, theta)) <= 1 and share == 1.0:
            # Nothing is said twice: it is read.
            assert read or theirs["partial_rotary_factor"] != 1.0, content
    assert accepted > 20
