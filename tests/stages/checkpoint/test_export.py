"""Exported weights are the run's, and `transformers` computes the same with them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.resumed import saving
from support.single_process import whole_model
from support.small_runs import Rows, small_config
from torch import Tensor

from stages.checkpoint import files
from stages.checkpoint.export import INDEX_FILE, write_weights
from stages.checkpoint.export_options import ExportFormat, Weights
from stages.checkpoint.files import CheckpointError
from stages.checkpoint.initial_weights import read_initial
from stages.checkpoint.saved_weights import SavedWeights, newest_weights
from stages.config.run_config import CorrectionConfig, RunConfig
from stages.shape.families import describe
from stages.shape.hf_config import hf_config
from stages.trainer import replay
from stages.training_loop import TrainingResult


def trained(config: RunConfig, folder: Path) -> tuple[TrainingResult, SavedWeights]:
    result = replay(saving(config), recorder=Rows(), checkpoints=folder)
    return result, newest_weights(folder, config)


def exported(saved: SavedWeights, config: RunConfig, folder: Path, **options: object) -> dict[str, Tensor]:
    """The tensors of all files written."""
    settings = {"format": ExportFormat.SAFETENSORS, "weights": Weights.MASTER} | options
    folder.mkdir()
    write_weights(saved, config, folder, **settings)  # type: ignore[arg-type]
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("schedule", "stages", "data", "form", "correction", "precision"),
    [
        ("1f1b", 1, 1, "look-ahead", "none", "float32"),
        ("interleaved-1f1b", 2, 1, "look-ahead", "none", "float64"),
        ("2bw", 4, 1, "look-ahead", "none", "bfloat16"),
        ("2bw", 2, 2, "buffered", "none", "float32"),
        ("2bw-v", 2, 2, "look-ahead", "none", "bfloat16"),
        ("paci", 2, 1, "look-ahead", "discrepancy", "float32"),
        ("pipedream", 3, 2, "look-ahead", "weight-prediction", "bfloat16"),
    ],
)
@pytest.mark.slow
def test_master_weights_are_those_that_are_evaluated(
    schedule: str, stages: int, data: int, form: str, correction: str, precision: str, tmp_path: Path
) -> None:
    config = small_config(
        schedule,
        stages=stages,
        data=data,
        microbatches=4,
        chunks=2 if schedule.startswith("inter") else 1,
        coefficient=1.0 if schedule == "2bw" else 0.0,
        form=form,
        precision=precision,
        clip="stage" if schedule in ("paci", "pipedream") else "global",
    )
    config.correction = CorrectionConfig(name=correction)
    result, saved = trained(config, tmp_path / "c")
    written = exported(saved, config, tmp_path / "out")
    assert written.keys() == result.weights.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in result.weights.items())
    for parameter in describe(config.model).whole():
        assert tuple(written[parameter.name].shape) == parameter.shape


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.slow
def test_data_ranks_start_from_given_weights_alike(precision: str, tmp_path: Path) -> None:
    config = small_config("2bw", microbatches=4)
    result, saved = trained(config, tmp_path / "c")
    exported(saved, config, tmp_path / "out")
    again = small_config("2bw", stages=3, data=2, microbatches=4, precision=precision, lr=1e-30, seed=7)
    again.model = replace(again.model, init=str(tmp_path / "out"))
    again.optimizer.weight_decay = 0.0
    started, _ = trained(again, tmp_path / "again")
    assert all(torch.equal(started.weights[name], tensor) for name, tensor in result.weights.items())


@pytest.mark.slow
def test_working_weights_are_the_newest_replica(tmp_path: Path) -> None:
    config = small_config("2bw", coefficient=1.0, precision="bfloat16")
    result, saved = trained(config, tmp_path / "c")
    written = exported(saved, config, tmp_path / "out", weights=Weights.WORKING)
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    # Error feedback computes with y + c (y - y before): not far from y, and not y.
    for name, tensor in result.weights.items():
        if tensor.ndim == 2:
            assert not torch.equal(written[name], tensor.bfloat16())
            torch.testing.assert_close(written[name].float(), tensor, rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "head_dim", "eps", "base", "tied", "parametrization"),
    [
        ("llama", 4, 2, None, 1e-5, 1e4, False, "standard"),
        ("llama", 2, 2, None, 1e-3, 500.0, True, "mup"),
        ("llama", 4, 2, 6, 1e-5, 1e4, False, "mup"),
        ("qwen3", 4, 2, 6, 1e-3, 1e6, True, "standard"),
        ("qwen3", 4, 2, None, 1e-5, 1e4, False, "mup"),
    ],
)
@pytest.mark.slow
def test_transformers_computes_the_same_logits(
    family: str,
    heads: int,
    kv_heads: int,
    head_dim: int | None,
    eps: float,
    base: float,
    tied: bool,
    parametrization: str,
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    if tied:
        config = small_config("2bw-v", stages=2, microbatches=4, lr=3e-2)
    else:
        config = small_config("2bw", stages=3, layers=3, lr=3e-2)
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "tied": tied}
    config.model = replace(config.model, family=family, **sizes, norm_eps=eps, rope_base=base)
    if parametrization == "mup":
        config.model = replace(
            config.model, parametrization="mup", base_width=12, base_layers=2, base_head_dim=3
        )
    config.data.context = 20
    result, saved = trained(config, tmp_path / "c")
    written = exported(saved, config, tmp_path / "out", format=ExportFormat.HF, shard_bytes=20_000)
    assert (tmp_path / "out" / INDEX_FILE).exists()
    assert ("lm_head.weight" in written) is not tied
    ours = whole_model(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(result.weights[name])
    theirs, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert theirs.config.model_type == family
    assert theirs.config.tie_word_embeddings is tied
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    tokens = torch.randint(256, (3, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = ours(tokens)
        assert logits.std() > 0.1
        torch.testing.assert_close(theirs(tokens).logits, logits, rtol=0, atol=1e-5)
    # A run that starts from them has the weights that were trained, up to one rounding of a factor.
    started = replace(config.model, init=str(tmp_path / "out"))
    for name, weight in read_initial(started, result.weights.keys()).items():
        torch.testing.assert_close(weight, result.weights[name], rtol=2e-7, atol=0)


def test_files_are_cut_by_size_and_the_index_names_each_weight_once(tmp_path: Path) -> None:
    config = small_config("1f1b", steps=1)
    result, saved = trained(config, tmp_path / "c")
    written = exported(saved, config, tmp_path / "out", format=ExportFormat.HF, shard_bytes=30_000)
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    parameters = list(describe(config.model).whole())
    assert index["weight_map"].keys() == written.keys() == {parameter.hf_name for parameter in parameters}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
    by_file: dict[str, int] = {}
    for name, file in index["weight_map"].items():
        by_file[file] = by_file.get(file, 0) + written[name].nbytes
    assert len(by_file) > 2
    assert max(by_file.values()) <= 30_000
    for parameter in parameters:
        assert torch.equal(written[parameter.hf_name], result.weights[parameter.name])


def test_transformers_has_no_class_with_a_cap(tmp_path: Path) -> None:
    config = small_config("1f1b", steps=1)
    config.model = replace(config.model, logit_softcap=30.0)
    _, saved = trained(config, tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"logit_softcap; accepted for it: --format safetensors"):
        exported(saved, config, tmp_path / "out", format=ExportFormat.HF)
    assert exported(saved, config, tmp_path / "own")


def test_config_says_what_the_model_is() -> None:
    """By transformers' own reading of it."""
    from transformers import LlamaConfig

    model = replace(small_config().model, norm_eps=3e-6, rope_base=777.0)
    read = LlamaConfig(**hf_config(model, context=64, dtype="bfloat16"))
    assert (read.num_attention_heads, read.num_key_value_heads, read.head_dim) == (4, 2, 4)
    assert (read.rms_norm_eps, read.max_position_embeddings) == (3e-6, 64)
    assert not read.tie_word_embeddings
    assert LlamaConfig(
        **hf_config(replace(model, tied=True), context=64, dtype="bfloat16")
    ).tie_word_embeddings
    assert (read.bos_token_id, read.eos_token_id) == (None, None)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_unless_requested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config("1f1b")
    folder = tmp_path / "c"
    trained(config, folder)
    newest, before = files.saved_steps(folder)
    [first, *_] = sorted(files.folder_of(folder, newest).glob("*.safetensors"))
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(content)
    assert newest_weights(folder, config).step == before
    assert "SHA-256" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="SHA-256"):
        newest_weights(folder, config, step=newest)
    with pytest.raises(
        CheckpointError, match=f"no checkpoint of step 99; there are those of {before}, {newest}"
    ):
        newest_weights(folder, config, step=99)
    shutil.rmtree(files.folder_of(folder, before))
    with pytest.raises(CheckpointError, match="no checkpoint that is whole"):
        newest_weights(folder, config, step=None)
