"""`model.init`: a run that starts from exported weights, or from a model of transformers."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command_line import asyncpp, succeeded
from support.small_runs import small_config
from support.templates import SHARED, TINY, run_of, train

from asyncpp_cli.experiment.matrix import expand
from asyncpp_cli.experiment.template import load
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.settings import config_hash
from stages.checkpoint.initial_weights import InitError, check_init, check_values, read_initial


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


@pytest.mark.slow
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


def changed(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights.pop(name, None)
    save_file(weights | ({} if tensor is None else {name: tensor}), file)


def bytes_changed(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Damage to the file of weights."""

    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return damage


def indexed(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def in_two_files(folder: Path, **others: torch.Tensor) -> None:
    """The weights in two files of an index; the second has others, too."""
    weights = load_file(folder / "model.safetensors")
    first = {name: weights.pop(name) for name in sorted(weights)[:3]}
    for file, content in (("a", first), ("b", weights | others)):
        save_file(content, folder / file)
    indexed(folder, dict.fromkeys(first, "a") | dict.fromkeys(weights, "b"))


def twice(folder: Path) -> None:
    in_two_files(folder, **{"lm_head.weight": torch.ones(256, 16)})
    (folder / "model.safetensors").unlink()


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
    (bytes_changed(lambda _: b"nonsense"), "is not safetensors"),
    (bytes_changed(lambda content: content[:-8]), "is not safetensors"),
    (bytes_changed(lambda _: struct.pack("<Q", 2**62) + b"{}"), "is not safetensors"),
    (partial(indexed, weight_map=["a"]), "index.json names no files beside it"),
    (partial(indexed, weight_map={"a": ["b"]}), "index.json names no files beside it"),
    (partial(indexed, weight_map={"a": "gone"}), "index.json names 'gone', which is no file beside it"),
    (twice, "w/b has lm_head.weight, and so has a"),
    (in_two_files, r"holds model.safetensors, and model.safetensors.index.json of others"),
]
TENSORS = [
    ("model.norm.weight", None, "has no model.norm.weight"),
    ("model.norm.weight", torch.ones(17), r"model.norm.weight is \[17\], the model tiny has \[16\]"),
    (
        "model.layers.4.mlp.up_proj.weight",
        torch.ones(1),
        "has model.layers.4.mlp.up_proj.weight, which the model tiny has no place for",
    ),
    (
        "model.norm.weight",
        torch.ones(16, dtype=torch.int64),
        r"w/model.safetensors: model.norm.weight is of type I64; accepted: F64, F32, F16, BF16",
    ),
    (
        "model.norm.weight",
        torch.full((16,), float("nan")),
        r"w/model.safetensors: model.norm.weight has values that are not finite",
    ),
]
CONFIGS = [
    ({"num_attention_heads": 8}, "num_attention_heads is 8, here 4"),
    ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, here 1e-05"),
    # What transformers takes where the file does not say.
    ({"rms_norm_eps": None}, "rms_norm_eps is left out, which is 1e-06 in LlamaForCausalLM, here 1e-05"),
    ({"model_type": "qwen3"}, "model_type is qwen3, and model.family: llama is llama"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type is llama3, here default"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; accepted: an object"),
    (
        {"rope_scaling": {"rope_theta": 500.0}, "rope_parameters": None},
        "rope_theta is 10000.0, and 500.0 in rope_s",
    ),
    (
        {"rope_parameters": {"full_attention": {}}},
        "rope_parameters has full_attention; accepted: rope_type, rope",
    ),
    ({"per_layer_config": {"0": {"rms_norm_eps": 1}}}, "per_layer_config is given; accepted: none"),
    ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; accepted: an object"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, and 1.0 in rope_parameters"),
]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *DAMAGES,
        *((partial(changed, name=name, tensor=tensor), message) for name, tensor, message in TENSORS),
        *((partial(rewritten, **settings), message) for settings, message in CONFIGS),
    ],
    ids=range(25),
)
def test_weights_that_do_not_fit_are_refused_before_anything_is_written(
    damage: Callable[[Path], object], message: str, run: Run, text: Path, tmp_path: Path
) -> None:
    asyncpp("export", run.folder, "--out", tmp_path / "w")
    damage(tmp_path / "w")
    template = tmp_path / "t.yaml"
    (tmp_path / "tiny.yaml").write_text(TINY)
    template.write_text(SHARED % (f"model.init: '{tmp_path / 'w'}'", text, 2, "2bw", "1e-2"))
    refused = asyncpp("sweep", template, "--out", tmp_path / "e")
    assert refused.code == 2
    assert re.search(message, refused.errors), refused.errors
    assert "model.init" in refused.errors
    assert not (tmp_path / "e").exists()


def test_an_untied_head_is_no_start_of_a_tied_one(run: Run, tmp_path: Path) -> None:
    asyncpp("export", run.folder, "--out", tmp_path / "w")
    tied = replace(small_config(text=tmp_path).model, tied=True, init=str(tmp_path / "w"))
    with pytest.raises(InitError, match="tie_word_embeddings is False, here True"):
        check_init(tied)
    rewritten(tmp_path / "w", tie_word_embeddings=True)
    differs = (
        r"w/model.safetensors: lm_head.weight differs from model.embed_tokens.weight; tied, they are one"
    )
    for model in (tied, replace(tied, tied=False)):
        check_init(model)
        with pytest.raises(InitError, match=differs):
            check_values(model)
    with pytest.raises(InitError, match=differs):
        read_initial(tied, ["embedding.weight"])
    changed(tmp_path / "w", "lm_head.weight", None)
    check_init(tied)
    check_values(tied)


@pytest.mark.parametrize(
    "metadata",
    [None, {}, {"dtype": "F32"}, {"format": "pt", "dtype": "F64", "data_offsets": "[0, 4]", "shape": "[]"}],
)
def test_metadata_of_any_names_is_no_weight(
    metadata: dict[str, str] | None, run: Run, tmp_path: Path
) -> None:
    asyncpp("export", run.folder, "--out", tmp_path / "w")
    file = tmp_path / "w" / "model.safetensors"
    whole = {name: tensor.clone() for name, tensor in load_file(file).items()}
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:begin]) | {"__metadata__": metadata}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + content[begin:])
    assert load_file(file).keys() == whole.keys()  # the library reads it
    model = replace(run.config().model, init=str(tmp_path / "w"))
    check_init(model)
    check_values(model)
    read = read_initial(model, ["embedding.weight"])
    assert torch.equal(read["embedding.weight"], whole["model.embed_tokens.weight"])


@pytest.mark.parametrize("layout", ["hf", "safetensors"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_weights_are_checked_whatever_their_type_and_files(
    dtype: str, layout: str, run: Run, tmp_path: Path
) -> None:
    """Published tied checkpoints have the head beside the embedding, which it is."""
    succeeded("export", run.folder, "--format", layout, "--out", tmp_path / "w")
    head, embedding = ("lm_head.weight", "model.embed_tokens.weight")
    if layout == "safetensors":
        head, embedding = ("head.weight", "embedding.weight")
    else:
        rewritten(tmp_path / "w", tie_word_embeddings=True)
    file = tmp_path / "w" / "model.safetensors"
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(file).items()}
    weights[head] = weights[embedding].clone()
    file.unlink()
    # In two files with an index, the head in another than the embedding.
    first = {name: tensor for name, tensor in weights.items() if name != head}
    parts = {"a.safetensors": first, "b.safetensors": {head: weights[head]}}
    index = {"weight_map": {name: part for part, tensors in parts.items() for name in tensors}}
    (tmp_path / "w" / "model.safetensors.index.json").write_text(json.dumps(index))
    tied = replace(run.config().model, tied=True, init=str(tmp_path / "w"))

    def refused(part: str, name: str, tensor: torch.Tensor) -> str:
        """What is said with one weight as given."""
        for file_name, tensors in parts.items():
            save_file(tensors | ({name: tensor} if file_name == part else {}), tmp_path / "w" / file_name)
        try:
            check_init(tied)
            check_values(tied)
            read_initial(tied, ["embedding.weight"])
        except InitError as error:
            return str(error).removeprefix(f"{tmp_path}/w/")
        return ""

    assert refused("b.safetensors", head, weights[head]) == ""
    for part, name in (("a.safetensors", embedding), ("b.safetensors", head)):
        wrong = weights[name].clone()
        for value in (float("nan"), float("inf"), -float("inf")):
            wrong.view(-1)[-1] = value
            assert refused(part, name, wrong) == f"{part}: {name} has values that are not finite"
        wrong.view(-1)[-1] = torch.finfo(wrong.dtype).max
        said = f"b.safetensors: {head} differs from {embedding}; tied, they are one"
        assert refused(part, name, wrong) == said
        for other in (torch.int8, torch.int32, torch.uint16, torch.bool, torch.float8_e4m3fn):
            assert f"{part}: {name} is of type" in refused(part, name, torch.ones(wrong.shape).to(other))
