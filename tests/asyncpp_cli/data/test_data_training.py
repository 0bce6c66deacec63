"""Prepared data from end to end: checked by sweep, trained on, reported in bits a byte, and looked at."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.command_line import asyncpp, refusal, succeeded
from support.files import edit
from support.launches import train_all
from support.texts import some_documents, write_lines, write_tokenizer

from asyncpp_cli.planner.cells import estimate_key
from asyncpp_cli.planner.costs.devices import find_device
from asyncpp_cli.planner.costs.roofline import Roofline
from asyncpp_cli.runs.experiment_folder import open_experiment
from stages.config.run_config import DataConfig, ModelConfig, RunConfig, changed
from stages.data.documents import computed_share

TEMPLATE = """
matrix: {schedule: 2bw, optimizer: adamw}
model: micro
model.vocab_size: 300
schedule.microbatches: 2
data: {path: prepared, context: 16}
train: {steps: 3, microbatch_size: 2, eval_microbatches: 1}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prepared folder, in the folder that commands are typed in."""
    monkeypatch.setenv("ASYNCPP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", some_documents(100))
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "mine.yaml").write_text(TEMPLATE)
    inputs = ["in.jsonl", "--tokenizer", "tokenizer.json", "--validation-share", "0.2", "--workers", "1"]
    ended = succeeded("data", "prepare", *inputs, "--out", "prepared")
    assert "model.vocab_size: 300 or more" in ended.output
    return tmp_path / "prepared"


@pytest.mark.slow
def test_a_run_on_prepared_data_is_reported_in_bits_a_byte(folder: Path, tmp_path: Path) -> None:
    succeeded("sweep", "mine.yaml", "--out", "out")
    train_all("out")
    [metrics] = (tmp_path / "out").rglob("metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    start = rows[0]
    validation = json.loads((folder / "manifest.json").read_text())["splits"]["validation"]
    assert start["bytes_per_token"] == validation["bytes"] / validation["tokens"]
    assert 3 < start["unigram_bits_per_byte"] < 6
    loss = next(row["val_loss"] for row in rows if row["kind"] == "eval")
    assert loss == pytest.approx(math.log(300), rel=0.1)
    [run] = json.loads(asyncpp("report", "out", "--format", "json").output)
    assert run["bits_per_byte"] == pytest.approx(loss / math.log(2) / start["bytes_per_token"])


def test_a_template_that_sets_no_vocabulary_takes_that_of_the_data(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text(TEMPLATE.replace("model.vocab_size: 300\n", ""))
    listed = [asyncpp("sweep", name, "--list", "--json") for name in ("mine.yaml", "bare.yaml")]
    said, bare = (json.loads(each.output) for each in listed)
    assert [cell["id"] for cell in said] == [cell["id"] for cell in bare]
    assert "model.vocab_size is 300, as the data needs; micro has fewer" in listed[1].errors
    assert "vocab_size" not in listed[0].errors
    # A size with room keeps its own.
    succeeded("sweep", "bare.yaml", "model=95m", "--out", "large")
    [run] = open_experiment(tmp_path / "large").runs
    assert run.config().model.vocab_size == 50304


def change_token(shard: Path, _: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-2] + b"\1\0")


def too_large_a_token(shard: Path, manifest: Path) -> None:
    tokens = np.fromfile(shard, "<u2")
    tokens[10] = 999
    tokens.tofile(shard)
    splits = json.loads(manifest.read_text())["splits"]
    splits["train"]["shards"][0]["sha256"] = hashlib.sha256(shard.read_bytes()).hexdigest()
    edit(manifest, splits=splits)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("model.vocab_size=299", ["model.vocab_size: is 299", "prepared needs 300 or more"]),
        (change_token, ["data.path", "train-000000.bin is not what its manifest says", "SHA-256"]),
        (
            too_large_a_token,
            ["data.path", "bin holds 999 at byte 20 (token 10)", "0 to 299"],
        ),
        (lambda _, manifest: edit(manifest, format=99), ["data.path", "format 99", "newer asyncpp"]),
    ],
)
def test_damaged_or_unfit_data_is_refused_before_anything_is_written(
    damage: str | Callable[[Path, Path], object], says: list[str], folder: Path, tmp_path: Path
) -> None:
    changes = [damage] if isinstance(damage, str) else []
    if not isinstance(damage, str):
        damage(folder / "train-000000.bin", folder / "manifest.json")
    said = refusal("sweep", "mine.yaml", *changes, "--out", "out")
    assert [words for words in says if words not in said] == []
    assert not (tmp_path / "out").exists()


def test_inspect_shows_counts_and_text(folder: Path) -> None:
    ended = succeeded("data", "inspect", folder, "--samples", "2", "--verify")
    content = json.loads((folder / "manifest.json").read_text())
    for split in content["splits"].values():
        assert f"{split['documents']:,}" in ended.output
        assert f"{split['tokens']:,}" in ended.output
    assert "2 files match the checksums of manifest.json" in ended.output
    assert ended.output.count("train, token ") == 2
    assert "quick" in asyncpp("data", "inspect", folder, "--samples", "20").output


@pytest.mark.slow
def test_inspect_names_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    change_token(folder / "train-000000.bin", folder)
    assert "SHA-256" in asyncpp("data", "inspect", folder, "--verify").errors
    (folder / "tokenizer.json").write_text("{}")
    assert "is not the tokenizer that manifest.json names" in asyncpp("data", "inspect", folder).errors
    (tmp_path / "empty").mkdir()
    assert "holds no manifest.json" in asyncpp("data", "inspect", tmp_path / "empty").errors


def test_samples_are_refused_where_they_cannot_be_drawn_or_decoded(tmp_path: Path) -> None:
    np.arange(1000, 1600, dtype="<u2").tofile(tmp_path / "a.bin")
    words = ("data", "inspect", tmp_path / "a.bin")
    assert "--seed: accepted: 0 or more" in refusal(*words, "--seed", "-1")
    assert ", and bytes has 0 to 255; accepted: the --tokenizer" in refusal(*words, "--tokenizer", "bytes")


def test_inspect_decodes_other_projects_tokens_if_told_how(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "train-000000.bin").read_bytes()
    (tmp_path / "nano").mkdir()
    (tmp_path / "nano" / "train.bin").write_bytes(whole)
    plain = succeeded("data", "inspect", tmp_path / "nano", "--samples", "1")
    assert "another project's format" in plain.output
    decoded = asyncpp("data", "inspect", tmp_path / "nano", "--samples", "9", "--tokenizer", "tokenizer.json")
    assert "quick" in decoded.output


@pytest.mark.slow
def test_attention_within_documents_needs_the_recorded_token_alone(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "masked.yaml"
    template.write_text(TEMPLATE.replace("context: 16", "context: 16, document_mask: true"))
    succeeded("sweep", template, "--out", "out")
    train_all("out")
    [metrics] = (tmp_path / "out").rglob("metrics.jsonl")
    start = json.loads(metrics.read_text().splitlines()[0])
    data = DataConfig(path=str(folder), context=16, document_mask=True)
    share = computed_share(data)
    assert start["attention_share"] == share
    assert 0.1 < share < 1
    masked = f"{1 - share:.0%} of causal attention is masked"
    assert masked in " ".join(succeeded("report", "out").output.split())
    planned = succeeded("plan", template, "--gpus", "2", "--device", "h100", "--rows", "1")
    assert f"Attention within documents is {share:.0%} of causal attention" in planned.errors
    refused = refusal("sweep", template, "data.end_of_document=3", "--out", "other")
    assert "data.end_of_document" in refused
    assert "records its own" in refused


def test_the_planner_counts_the_attention_that_remains(folder: Path) -> None:
    roofline = Roofline(find_device("h100", key=""))
    model = ModelConfig(name="flat", layers=1, width=64, heads=4, kv_heads=4, mlp_width=8, vocab_size=300)
    config = RunConfig(model=model, data=DataConfig(path=str(folder), context=512))
    config = changed(config, {"train.precision": "bfloat16", "parallel.stages": 1})
    plain = roofline.parts(config).blocks[0].forward
    config = changed(config, {"data.document_mask": True})
    masked = roofline.parts(config).blocks[0].forward
    tokens = config.train.microbatch_size * 512
    whole = (
        2 * tokens * 64 * 512 / (roofline.device.tflops["bfloat16"] * 1e12 * roofline.device.attention_share)
    )
    assert plain - masked == pytest.approx(whole * (1 - computed_share(config.data)), rel=1e-6)
    assert estimate_key(config) != estimate_key(replace(config, data=replace(config.data, path="elsewhere")))
