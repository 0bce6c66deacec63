"""--json of the commands that list things, and notes on what was listed."""

from __future__ import annotations

import json
from pathlib import Path

from support.command_line import asyncpp, succeeded


def test_templates_are_listed_in_a_line_each_and_as_json() -> None:
    listed = asyncpp("templates", "list")
    records = json.loads(asyncpp("templates", "list", "--json").output)
    title, _, *lines = listed.output.splitlines()
    assert title.startswith(f"{len(records)} templates in ")
    assert [line.split()[1] for line in lines] == [record["name"] for record in records]
    # A line of 120 columns has room for kind, name and this.
    assert max(len(record["about"]) for record in records) < 110
    [nano] = [record for record in records if record["name"] == "nano"]
    assert nano["about"] == "4 blocks of 128, 853,120 parameters"


def test_cells_are_listed_as_json() -> None:
    listed = asyncpp("sweep", "quickstart", "--list", "--json")
    cells = json.loads(listed.output)
    assert len(cells) == 6
    assert cells[0]["axes"]["schedule"] == "1f1b"
    assert cells[0]["id"].startswith("1f1b-muon-ef0-nano-s0-")
    assert cells[0]["memory_gb"] > 0


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
