"""`asyncpp export`: weights of a run, and the files beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import asyncpp, refusal, succeeded
from support.templates import SHARED, TINY, run_of, train
from support.texts import some_documents, write_lines, write_tokenizer, written_tokens
from tokenizers import pre_tokenizers, processors

from asyncpp_cli.commands.results.exported import encoding_difference, for_transformers
from asyncpp_cli.data.tokenizers import Library
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


@pytest.mark.parametrize("start", [None, "<s>"])
@pytest.mark.slow
def test_the_tokenizer_of_prepared_data_comes_with_a_model_for_transformers(
    start: str | None, tmp_path: Path
) -> None:
    """It makes the tokens that were trained on, though the given one adds some of its own, and cuts."""
    from transformers import AutoTokenizer

    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", specials=["</s>", "<s>"])
    tokenizer.post_processor = POST_PROCESSORS["template"]
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    documents, data = some_documents(60), tmp_path / "data"
    write_lines(tmp_path / "in.jsonl", documents)
    options = ["--validation-share", "0.1"] if start is None else ["--start-of-document", start]
    arguments = [
        tmp_path / "in.jsonl",
        "--tokenizer",
        tmp_path / "tokenizer.json",
        *options,
        "--workers",
        "1",
    ]
    succeeded("data", "prepare", *arguments, "--out", data)
    (tmp_path / "tiny.yaml").write_text(TINY.replace("}", ", vocab_size: 320}"))
    (tmp_path / "t.yaml").write_text(SHARED % ("", data, 1, "1f1b", "1e-3"))
    succeeded("sweep", tmp_path / "t.yaml", "--out", tmp_path / "e")
    [run] = open_experiment(tmp_path / "e").runs
    train(run)
    succeeded("export", run.folder, "--out", tmp_path / "hf")
    said = json.loads((tmp_path / "hf" / "config.json").read_text())
    recorded = json.loads((data / "manifest.json").read_text())["tokenizer"]
    assert said["eos_token_id"] == recorded["end_of_document"] == 0
    assert said["bos_token_id"] == recorded["start_of_document"] == (None if start is None else 1)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    trained = [token for tokens in written_tokens(data).values() for token in tokens]
    read = [token for document in documents for token in (*loaded(document)["input_ids"], 0)]
    assert sorted(read) == sorted(trained)
    assert read.count(1) == (0 if start is None else len(documents))
    assert (loaded.bos_token, loaded.eos_token, loaded.eos_token_id) == (start, "</s>", 0)
    succeeded("export", run.folder, "--format", "safetensors", "--out", tmp_path / "own")
    assert [file.name for file in (tmp_path / "own").iterdir()] == ["model.safetensors"]
    (data / "tokenizer.json").write_text((data / "tokenizer.json").read_text() + " ")
    changed = succeeded("export", run.folder, "--out", tmp_path / "changed")
    assert "The tokenizer is left out" in changed.errors
    assert "is not the tokenizer that manifest.json names" in changed.errors


_SPECIAL = [("</s>", 0), ("<s>", 1)]
POST_PROCESSORS = {
    "none": None,
    "template": processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A <s> $B:1", special_tokens=_SPECIAL
    ),
    "bert": processors.BertProcessing(*_SPECIAL),
    "roberta": processors.RobertaProcessing(*_SPECIAL),
    "byte-level": processors.ByteLevel(trim_offsets=False),
    "sequence": processors.Sequence(
        [
            processors.ByteLevel(),
            processors.TemplateProcessing(single="$A </s>", pair=None, special_tokens=_SPECIAL),
        ]
    ),
}


@pytest.mark.parametrize("start", [None, "<s>"])
@pytest.mark.parametrize("kind", POST_PROCESSORS)
@pytest.mark.parametrize("space", [False, True])
def test_transformers_reads_a_text_as_training_did(
    space: bool, kind: str, start: str | None, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = write_tokenizer(tmp_path / "t.json", specials=["</s>", "<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.post_processor = POST_PROCESSORS[kind]
    trained = tokenizer.to_str()
    content, settings = for_transformers(trained, start=None if start is None else 1, end=0)
    assert encoding_difference(trained, content, settings) is None
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*some_documents(3), "12 . 5, it 's", " a\r\n\tb", ""):
        [tokens] = Library(trained, name="t", end="</s>").encode([text.encode()])
        assert loaded(text)["input_ids"] == [1] * (start is not None) + tokens.tolist()
        assert loaded.decode(tokens.tolist()) == tokenizer.decode(tokens.tolist())


def test_a_tokenizer_that_transformers_would_read_in_another_way_is_noticed(tmp_path: Path) -> None:
    """transformers takes the end of a document out of a text before anything else is done with it."""
    tokenizer = write_tokenizer(tmp_path / "t.json")
    content, settings = for_transformers(tokenizer.to_str(), start=None, end=tokenizer.token_to_id("o"))
    said = encoding_difference(tokenizer.to_str(), content, settings)
    assert said is not None
    assert "of a sample on" in said


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
