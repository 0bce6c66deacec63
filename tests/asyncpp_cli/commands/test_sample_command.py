"""`asyncpp sample`: text from a run's model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.command_line import refusal, succeeded
from support.exported_runs import SHARED, TINY, train
from support.files import ROOT
from support.texts import prepared, some_documents, write_lines, write_tokenizer

from asyncpp_cli.base.plain_text import printable_lines
from asyncpp_cli.experiment.run_data import owners_of
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import Run
from stages.checkpoint.sample import whole_model
from stages.checkpoint.saved_weights import newest_weights
from stages.data.batches import Batches
from stages.data.dataset import find_corpus


def run_with(folder: Path, data: Path, model: str) -> Run:
    (folder / "tiny.yaml").write_text(model)
    (folder / "t.yaml").write_text(SHARED % ("", data, 2, "2bw", "1e-2"))
    succeeded("sweep", folder / "t.yaml", "--out", folder / "e")
    [run] = open_experiment(folder / "e").runs
    train(run)
    return run


def test_at_temperature_0_it_is_the_likeliest_text_by_transformers(run: Run, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    succeeded("export", run.folder, "--out", tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = list(b"def f")
    for _ in range(20):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens[-12:]])).logits[0, -1].argmax()))
    said = succeeded("sample", run.folder, "def f", "--temperature", "0", "--max-tokens", "20").output
    written = bytes(tokens).partition(b"\0")[0].decode(errors="replace")
    assert said == printable_lines(written) + "\n"


def test_a_seed_gives_the_same_text_and_another_another(run: Run) -> None:
    def text(*options: str) -> str:
        return succeeded("sample", run.folder, "def", "--max-tokens", "60", *options).output

    assert text("--seed", "7") == text("--seed", "7") != text("--seed", "8")
    assert text().startswith("def")
    assert succeeded("sample", run.folder, "--max-tokens", "5").output
    assert "--temperature 101: accepted: 0 to 100" in refusal(
        "sample", run.folder, "def", "--temperature", "101"
    )
    # A model of bytes may write any byte; none steers the terminal.
    assert not set(text("--temperature", "100")) & set("\x1b\x07\x00")


def test_the_tokenizer_is_that_of_the_data(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    write_lines(tmp_path / "documents.jsonl", some_documents(80))
    data = tmp_path / "data"
    prepared(
        tmp_path / "documents.jsonl",
        "--tokenizer",
        tmp_path / "tokenizer.json",
        "--validation-share",
        "0.3",
        out=data,
    )
    run = run_with(tmp_path, data, TINY.replace("}", ", vocab_size: 320}"))
    said = succeeded("sample", run.folder, "some text", "--max-tokens", "8", "--temperature", "0").output
    assert said.startswith("some text")
    data.rename(tmp_path / "gone")
    assert "so its tokenizer is not known; name it: --tokenizer PATH" in refusal("sample", run.folder, "x")
    again = succeeded(
        "sample", run.folder, "some text", "--max-tokens", "8", "--temperature", "0", "--tokenizer",
        tmp_path / "tokenizer.json",
    )  # fmt: skip
    assert again.output == said


@pytest.mark.parametrize(
    "model",
    [TINY, TINY.replace("}", ", experts: 4, active_experts: 2, expert_width: 8, shared_experts: 1}")],
    ids=["dense", "experts"],
)
def test_the_whole_model_has_the_loss_that_the_run_measured(model: str, tmp_path: Path) -> None:
    """With the balance biases of its last step."""
    run = run_with(tmp_path, ROOT / "tests" / "support" / "prose", model)
    config = run.config()
    module, routing = whole_model(newest_weights(run.checkpoints, config, owners=owners_of(run)), config)
    batches = Batches(config, find_corpus(config.data), device=torch.device("cpu"))
    given, targets = batches.validation(0, count=1)
    with torch.no_grad():
        loss = float(module(given, routing, targets=targets))
    [row] = [row for row in run.metrics() if row["kind"] == "eval"]
    # float32, in another order of sums.
    assert loss == pytest.approx(row["val_loss"], rel=1e-6)
