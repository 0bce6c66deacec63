"""Commands that list things: for people and as JSON, and notes on what was listed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support.command_line import asyncpp, succeeded

from optimizers import CORRECTIONS, METHODS


def test_templates_are_listed_in_a_line_each_and_as_json() -> None:
    listed = asyncpp("templates", "list")
    records = json.loads(asyncpp("templates", "list", "--json").output)
    title, _, *lines = listed.output.splitlines()
    assert title.startswith(f"{len(records)} templates in ")
    assert [line.split()[1] for line in lines] == [record["name"] for record in records]
    # A line of 120 columns has room for kind, name and this.
    assert max(len(record["about"]) for record in records) < 110
    assert {"quickstart", "nano", "micro", "135m", "360m", "local"} <= {record["name"] for record in records}
    for record in records:
        assert succeeded("templates", "show", record["name"]).output.strip()
    [nano] = [record for record in records if record["name"] == "nano"]
    assert nano["about"] == "4 blocks of 128, 853,120 parameters"


def test_cells_are_listed_as_json() -> None:
    listed = asyncpp("sweep", "quickstart", "--list", "--json")
    cells = json.loads(listed.output)
    assert len(cells) == 6
    assert cells[0]["axes"]["schedule"] == "1f1b"
    assert cells[0]["id"].startswith("1f1b-muon-ef0-nano-s0-")
    assert cells[0]["memory_gb"] > 0


def test_the_memory_of_a_cell_is_that_of_the_device_that_its_run_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's gigabyte only where there is a GPU, here or by name."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for changes, least, most in (
        ([], 0.01, 0.2),
        (["site.device=cpu"], 0.01, 0.2),
        (["site.device=cuda"], 1.0, 1.5),
        (["site.gpu=h100"], 1.0, 1.5),
        (["site.memory_gb=80"], 1.0, 1.5),
    ):
        listed = asyncpp("sweep", "quickstart", *changes, "--list", "--json")
        assert all(least < cell["memory_gb"] < most for cell in json.loads(listed.output)), changes


def test_files_of_a_folder_of_text_that_are_not_read_are_named(tmp_path: Path) -> None:
    """Compressed ones were left out without a word."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text " * 5000)
    words = ["sweep", "quickstart", f"data.path={tmp_path / 'texts'}", "--list"]
    assert "not read" not in asyncpp(*words).errors
    for name in ("b.txt.gz", "c.txt.gz", ".hidden.gz"):
        (tmp_path / "texts" / name).write_bytes(gzip.compress(b"text", mtime=0))
    assert "texts: b.txt.gz and 1 more not read: no text (`data prepare` reads" in asyncpp(*words).errors


def test_prepared_data_is_inspected_as_json_and_few_documents_are_noted(tmp_path: Path) -> None:
    text = "\n<|endoftext|>\n".join(f"document {number} " * 30 for number in range(400))
    (tmp_path / "text.txt").write_text(text)
    for name, share, documents in (("few", "0.01", 4), ("many", "0.2", 80)):
        data = tmp_path / name
        made = succeeded(
            *("data", "prepare", tmp_path / "text.txt", "--tokenizer", "bytes", "--workers", "1"),
            *("--validation-share", share, "--out", data),
        )
        shown = json.loads(asyncpp("data", "inspect", data, "--samples", "1", "--json").output)
        assert shown["splits"]["train"]["documents"] == 400 - shown["splits"]["validation"]["documents"]
        assert shown["tokenizer"] == "bytes"
        [sample] = shown["splits"]["train"]["samples"]
        assert bytes(sample["tokens"]).decode() == sample["text"]
        note = (
            f"has {shown['splits']['validation']['documents']} documents, so its loss depends on which ones"
        )
        swept = asyncpp("sweep", "quickstart", f"data.path={data}", "--list")
        assert (note in made.errors, note in swept.errors) == (
            (True, True) if documents < 20 else (False, False)
        )


def test_list_as_json() -> None:
    ended = succeeded("optimizers", "list", "--json")
    assert ended.errors == ""
    rows = {row["name"]: row for row in json.loads(ended.output)}
    assert rows.keys() == METHODS.keys()
    assert rows["muon"]["state_bytes_per_parameter"] == 4
    assert rows["adamw"]["state_bytes_per_parameter"] == 8
    assert rows["basis-rotation"]["reference"] == "arXiv 2602.03515"
    assert rows["nadamw"]["defaults"]["beta1"] == 0.99


def test_list_names_every_optimizer_and_correction_with_its_paper() -> None:
    ended = succeeded("optimizers", "list")
    starts = [line.split() for line in ended.output.splitlines()]
    for entry in [*METHODS.values(), *CORRECTIONS.values()]:
        (line,) = [words for words in starts if words[:1] == [entry.name]]
        assert line[1] == f"{entry.state_bytes_per_parameter:g}"
        assert entry.reference.split()[-1] in line
    assert "momentum=0.95" in ended.output
    assert "optimizers show NAME" in ended.errors


def test_show_gives_rules_and_settings() -> None:
    ended = succeeded("optimizers", "show", "muon")
    assert "Set by optimizer.name: muon" in ended.output
    assert "embedding   adamw  no" in ended.output
    assert "scale               match-rms      match-rms | original" in ended.output


def test_show_gives_a_corrections_settings() -> None:
    ended = succeeded("optimizers", "show", "weight-prediction")
    assert "flavour  last-update  last-update | momentum | adam-moments" in ended.output
    assert "Set by correction.name: weight-prediction" in ended.output
    buffered = succeeded("optimizers", "show", "error-feedback-buffered").output
    assert "Set by error_feedback.coefficient and error_feedback.form: buffered" in buffered


@pytest.mark.slow
def test_stability_is_a_table_or_json() -> None:
    asked = ("--momentum", "nesterov-ema", "--beta", "0.95", "--delay", "1", "--coefficient", "1", "--json")
    found = json.loads(succeeded("theory", "stability", *asked).output)
    assert (found["momentum"], found["limit"]) == ("nesterov-ema", pytest.approx(6.78, abs=0.005))
    ended = succeeded("theory", "stability")
    (row,) = [line.split() for line in ended.output.splitlines() if line.startswith("nesterov-ema  0.95")]
    assert row[2:5] == ["26.9", "3.75", "6.78"]
    assert "delay 3" in asyncpp("theory", "stability", "--delay", "3").output
