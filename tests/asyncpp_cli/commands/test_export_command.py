"""`asyncpp export`: weights of a run, and the files beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import asyncpp, refusal, succeeded
from support.exported_runs import SHARED, TINY, run_of, train

from asyncpp_cli.runs.config_file import config_text
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import Run


@pytest.mark.parametrize("layout", ["hf", "safetensors"])
@pytest.mark.slow
def test_export_import_export_is_byte_identical(layout: str, run: Run, text: Path, tmp_path: Path) -> None:
    """Over another number of stages, and a run that learns next to nothing."""
    first, second = tmp_path / "first", tmp_path / "second"
    succeeded("export", run.folder, "--format", layout, "--out", first)
    again = run_of(tmp_path / "again", text, stages=4, schedule="1f1b", lr="1e-30", init=first)
    ended = succeeded("export", again.folder, "--format", layout, "--out", second)
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
    assert "no checkpoint of step 1; there are those of 2" in refusal(
        "export", run.folder, "--out", tmp_path / "x", "--step", "1"
    )
    assert "the run keeps no average of its weights (train.ema_decay: null)" in refusal(
        "export", run.folder, "--out", tmp_path / "x", "--weights", "ema"
    )
    assert not (tmp_path / "x").exists()


def test_export_overwrites_nothing_and_says_what_is_missing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("precious")
    assert "exists already" in refusal("export", run.folder, "--out", tmp_path / "full")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["mine"]
    fresh = Run(tmp_path / "fresh")
    fresh.folder.mkdir()
    fresh.config_file.write_text(config_text(run.config()))
    assert "no checkpoint yet" in refusal("export", fresh.folder, "--out", tmp_path / "out")
    assert "no such experiment or run" in refusal("export", tmp_path, "--out", tmp_path / "out")


@pytest.mark.slow
def test_the_tokenizer_of_prepared_data_comes_with_a_model_for_transformers(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    (tmp_path / "text.txt").write_text(Path(__file__).read_text() * 4)
    data = tmp_path / "data"
    succeeded("data", "prepare", tmp_path / "text.txt", "--tokenizer", "train:300", "--out", data)
    (tmp_path / "tiny.yaml").write_text(TINY.replace("}", ", vocab_size: 320}"))
    (tmp_path / "t.yaml").write_text(SHARED % ("", data, 1, "1f1b", "1e-3"))
    succeeded("sweep", tmp_path / "t.yaml", "--out", tmp_path / "e")
    [run] = open_experiment(tmp_path / "e").runs
    train(run)
    succeeded("export", run.folder, "--out", tmp_path / "hf")
    said = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (
        said["eos_token_id"]
        == json.loads((data / "manifest.json").read_text())["tokenizer"]["end_of_document"]
    )
    text = "def test_the_tokenizer(tmp_path: Path)"
    expected = Tokenizer.from_file(str(data / "tokenizer.json")).encode(text).ids
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert loaded(text)["input_ids"] == expected
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|endoftext|>", said["eos_token_id"])
    check_that_lm_eval_scores(tmp_path / "hf")
    succeeded("export", run.folder, "--format", "safetensors", "--out", tmp_path / "own")
    assert [file.name for file in (tmp_path / "own").iterdir()] == ["model.safetensors"]


@pytest.mark.slow
def test_an_export_of_a_model_of_bytes_has_a_tokenizer_of_bytes(run: Run, tmp_path: Path) -> None:
    """Plain text as the data, as in the quickstart."""
    from transformers import AutoTokenizer

    succeeded("export", run.folder, "--out", tmp_path / "hf")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "Tab\t, newline\n, Ā, ł, 漢, 🙂,  two spaces and <|endoftext|>"
    tokens = loaded(text, split_special_tokens=True)["input_ids"]
    assert tokens == list(text.encode())
    assert loaded.decode(tokens) == text
    assert (loaded.eos_token, loaded.eos_token_id, len(loaded)) == ("<|endoftext|>", 0, 256)
    check_that_lm_eval_scores(tmp_path / "hf")


def check_that_lm_eval_scores(folder: Path) -> None:
    """Load an export with the evaluation harness, where that is installed, and score a text with it."""
    try:
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM
    except ImportError:
        return
    model = HFLM(pretrained=str(folder), device="cpu", batch_size=2)
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=arguments, idx=0)
        for arguments in (("", "def"), ("def ", "test"))
    ]
    assert all(likelihood < 0 for likelihood, _ in model.loglikelihood(requests))


def test_names_of_files_cannot_steer_a_terminal_nor_what_is_piped(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "w\x1b]0;title\x07"
    done = asyncpp("export", run.folder, "--out", folder)
    assert (done.code, "w\ufffd]0;title\ufffd: master weights" in done.output) == (0, True)
    program = folder / "2bw\x1b[2J.program"
    wrote = asyncpp("schedule", "export", "2bw", "--stages", "2", "--microbatches", "2", "--out", program)
    text = program.read_text().replace("schedule: 2bw", "schedule: evil\x1b[31m")
    program.write_text(text)
    for ended in (wrote, asyncpp("schedule", "check", program), asyncpp("schedule", "show", program)):
        assert (ended.code, set(ended.output + ended.errors) & set("\x1b\x07")) == (0, set()), ended
