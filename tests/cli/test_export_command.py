"""Weights out of a run and into another, through the command line."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import asyncpp
from safetensors.torch import load_file, save_file

from asyncpp_cli.matrix import expand
from asyncpp_cli.recorder import RunRecorder
from asyncpp_cli.runs import Run, open_experiment
from asyncpp_cli.settings import config_hash, config_text
from asyncpp_cli.template_file import load
from stages.config import ModelConfig
from stages.initial_weights import InitError, check_init, read_initial
from stages.llama_layout import config_differences
from stages.trainer import replay

TINY = "{layers: 4, width: 16, heads: 4, kv_heads: 2, mlp_width: 24}"
SHARED = """
model: tiny.yaml
%s
data: {path: %s, context: 12}
parallel: {stages: %d}
schedule: {name: %s, microbatches: 4}
optimizer: {name: adamw, lr: %s, weight_decay: 0}
train: {steps: 2, microbatch_size: 1, eval_microbatches: 1}
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(Path(__file__).read_text() * 4)
    return file


def run_of(
    folder: Path,
    text: Path,
    *,
    stages: int,
    schedule: str = "2bw",
    lr: str = "1e-2",
    init: Path | None = None,
) -> Run:
    """A run that has been trained in one process."""
    model = "" if init is None else f"model.init: '{init}'"
    folder.mkdir()
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "template.yaml").write_text(SHARED % (model, text, stages, schedule, lr))
    assert asyncpp("sweep", folder / "template.yaml", "--out", folder / "e").code == 0
    [run] = open_experiment(folder / "e").runs
    train(run)
    return run


def train(run: Run) -> None:
    # Not by `asyncpp train`: that takes over the process's signals.
    recorder = RunRecorder(run, attempt=1)
    replay(run.config(), recorder=recorder, checkpoints=run.checkpoints)
    recorder.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Run:
    return run_of(tmp_path_factory.mktemp("run") / "r", text, stages=2)


@pytest.mark.parametrize("layout", ["hf", "safetensors"])
def test_export_import_export_is_byte_identical(layout: str, run: Run, text: Path, tmp_path: Path) -> None:
    """Over another number of stages, and a run that learns next to nothing."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert asyncpp("export", run.folder, "--format", layout, "--out", first).code == 0
    again = run_of(tmp_path / "again", text, stages=4, schedule="1f1b", lr="1e-30", init=first)
    ended = asyncpp("export", again.folder, "--format", layout, "--out", second)
    assert ended.code == 0
    assert "master weights" in ended.output
    assert sorted(file.name for file in first.iterdir()) == sorted(file.name for file in second.iterdir())
    (tmp_path / "plain").touch()
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()
        assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (first / "config.json").exists() == (layout == "hf")


def test_an_older_checkpoint_and_working_weights_can_be_asked_for(run: Run, tmp_path: Path) -> None:
    assert (
        asyncpp("export", run.folder, "--out", tmp_path / "w", "--weights", "working", "--step", "2").code
        == 0
    )
    refused = asyncpp("export", run.folder, "--out", tmp_path / "x", "--step", "1")
    assert (refused.code, "no checkpoint of step 1; there are those of 2" in refused.errors) == (2, True)
    assert not (tmp_path / "x").exists()


def test_export_overwrites_nothing_and_says_what_is_missing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("precious")
    refused = asyncpp("export", run.folder, "--out", tmp_path / "full")
    assert (refused.code, "is there already" in refused.errors) == (2, True)
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["mine"]
    fresh = Run(tmp_path / "fresh")
    fresh.folder.mkdir()
    fresh.config_file.write_text(config_text(run.config()))
    refused = asyncpp("export", fresh.folder, "--out", tmp_path / "out")
    assert (refused.code, "no checkpoint yet" in refused.errors) == (2, True)
    refused = asyncpp("export", tmp_path, "--out", tmp_path / "out")
    assert (refused.code, "is not a run" in refused.errors) == (2, True)


def test_identity_is_what_the_weights_are_and_not_where(run: Run, text: Path, tmp_path: Path) -> None:
    asyncpp("export", run.folder, "--out", tmp_path / "here")
    (tmp_path / "there").mkdir()
    template = tmp_path / "t.yaml"
    (tmp_path / "tiny.yaml").write_text(TINY)

    def digest(init: Path | None) -> str:
        model = "" if init is None else f"model.init: '{init}'"
        template.write_text(SHARED % (model, text, 2, "2bw", "1e-2"))
        [resolved] = expand(load(str(template), []))
        return config_hash(resolved.config)

    weights = load_file(tmp_path / "here" / "model.safetensors")
    save_file(weights, tmp_path / "there" / "model.safetensors", metadata={"format": "pt"})
    assert digest(tmp_path / "here") == digest(tmp_path / "there") != digest(None)
    weights["model.norm.weight"][0] += 1
    save_file(weights, tmp_path / "there" / "model.safetensors", metadata={"format": "pt"})
    assert digest(tmp_path / "here") != digest(tmp_path / "there")


def test_weights_that_change_after_the_sweep_are_refused(run: Run, text: Path, tmp_path: Path) -> None:
    asyncpp("export", run.folder, "--out", tmp_path / "w")
    started = run_of(tmp_path / "r", text, stages=1, schedule="1f1b", init=tmp_path / "w")
    weights = load_file(tmp_path / "w" / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, tmp_path / "w" / "model.safetensors")
    fresh = Run(tmp_path / "fresh")
    fresh.folder.mkdir()
    fresh.config_file.write_text(started.config_file.read_text())
    with pytest.raises(InitError, match="has changed since the run was made"):
        train(fresh)
    # A run that goes on from its own checkpoint does not need them any more.
    (tmp_path / "w" / "model.safetensors").unlink()
    train(started)


def rewritten(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"nonsense"), "is not safetensors"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(
                (folder / "model.safetensors").read_bytes()[:-8]
            ),
            "is not safetensors",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}"),
            "is not safetensors",
        ),
        (lambda folder: changed(folder, "model.norm.weight", None), "has no model.norm.weight"),
        (
            lambda folder: changed(folder, "model.norm.weight", torch.ones(17)),
            r"model.norm.weight is \[17\], the model tiny has \[16\]",
        ),
        (
            lambda folder: changed(folder, "model.layers.4.mlp.up_proj.weight", torch.ones(1)),
            "has model.layers.4.mlp.up_proj.weight, which the model tiny has no place for",
        ),
        (lambda folder: rewritten(folder, num_attention_heads=8), "num_attention_heads is 8, here 4"),
        (lambda folder: rewritten(folder, rms_norm_eps=1e-6), "rms_norm_eps is 1e-06, here 1e-05"),
        # What transformers takes where the file does not say.
        (lambda folder: rewritten(folder, rms_norm_eps=None), "rms_norm_eps is 1e-06, here 1e-05"),
        (
            lambda folder: rewritten(folder, rope_scaling={"rope_type": "llama3", "factor": 8.0}),
            "rope_type is llama3, here default",
        ),
    ],
    ids=range(11),
)
def test_weights_that_do_not_fit_are_refused_before_anything_is_written(
    damage: object, message: str, run: Run, text: Path, tmp_path: Path
) -> None:
    import re

    asyncpp("export", run.folder, "--out", tmp_path / "w")
    damage(tmp_path / "w")  # type: ignore[operator]
    template = tmp_path / "t.yaml"
    (tmp_path / "tiny.yaml").write_text(TINY)
    template.write_text(SHARED % (f"model.init: '{tmp_path / 'w'}'", text, 2, "2bw", "1e-2"))
    refused = asyncpp("sweep", template, "--out", tmp_path / "e")
    assert refused.code == 2
    assert re.search(message, refused.errors), refused.errors
    assert "model.init" in refused.errors
    assert not (tmp_path / "e").exists()


def changed(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights.pop(name, None)
    save_file(weights | ({} if tensor is None else {name: tensor}), file)


def test_a_model_of_transformers_is_a_start_even_with_a_tied_head(text: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    )
    llama.save_pretrained(tmp_path / "llama", max_shard_size="8KB")
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 1
    model = ModelConfig(
        name="m", layers=2, width=16, heads=4, kv_heads=2, mlp_width=24, init=str(tmp_path / "llama")
    )
    check_init(model)
    read = read_initial(model, ["head.weight", "embedding.weight", "blocks.1.mlp.down.weight"])
    theirs = llama.state_dict()
    assert torch.equal(read["head.weight"], theirs["model.embed_tokens.weight"])
    assert torch.equal(read["embedding.weight"], theirs["model.embed_tokens.weight"])
    assert torch.equal(read["blocks.1.mlp.down.weight"], theirs["model.layers.1.mlp.down_proj.weight"])
    with pytest.raises(ValueError, match=r"rope_theta is 10000\.0, here 500"):
        check_init(replace(model, rope_base=500.0))


def test_what_a_config_leaves_out_is_what_transformers_takes() -> None:
    from transformers import LlamaConfig

    taken = LlamaConfig(num_attention_heads=4, hidden_size=16)
    given = ModelConfig(name="m", layers=2, width=16, heads=4, kv_heads=4, mlp_width=24)
    assert config_differences(replace(given, norm_eps=taken.rms_norm_eps), {}) == []
    base = taken.rope_parameters["rope_theta"]
    assert config_differences(given, {"rms_norm_eps": 1e-5}) == []
    assert config_differences(replace(given, rope_base=5e5), {"rms_norm_eps": 1e-5}) == [
        f"rope_theta is {base:.1f}, here 500000.0"
    ]


def test_the_tokenizer_of_prepared_data_comes_with_a_model_for_transformers(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    (tmp_path / "text.txt").write_text(Path(__file__).read_text() * 4)
    data = tmp_path / "data"
    made = asyncpp("data", "prepare", tmp_path / "text.txt", "--tokenizer", "train:300", "--out", data)
    assert made.code == 0, made.errors
    (tmp_path / "tiny.yaml").write_text(TINY.replace("}", ", vocab_size: 320}"))
    (tmp_path / "t.yaml").write_text(SHARED % ("", data, 1, "1f1b", "1e-3"))
    assert asyncpp("sweep", tmp_path / "t.yaml", "--out", tmp_path / "e").code == 0
    [run] = open_experiment(tmp_path / "e").runs
    train(run)
    assert asyncpp("export", run.folder, "--out", tmp_path / "hf").code == 0
    said = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (
        said["eos_token_id"]
        == json.loads((data / "manifest.json").read_text())["tokenizer"]["end_of_document"]
    )
    text = "def test_the_tokenizer(tmp_path: Path)"
    expected = Tokenizer.from_file(str(data / "tokenizer.json")).encode(text).ids
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")(text)["input_ids"] == expected
    assert asyncpp("export", run.folder, "--format", "safetensors", "--out", tmp_path / "own").code == 0
    assert [file.name for file in (tmp_path / "own").iterdir()] == ["model.safetensors"]
