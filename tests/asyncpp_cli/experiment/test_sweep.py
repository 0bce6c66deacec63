"""`asyncpp sweep` and the templates that are shipped."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from support.command_line import asyncpp, refusal, succeeded
from support.files import contents

from asyncpp_cli.experiment.matrix import expand
from asyncpp_cli.experiment.shipped import template_names
from asyncpp_cli.experiment.template import load
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.settings import config_hash


def test_a_folder_keeps_the_users_text_beside_what_it_resolved_to(tmp_path: Path) -> None:
    text = "# why these rates\nbase: quickstart\ndata.context: 64  # short\n"
    mine, folder = tmp_path / "mine.yaml", tmp_path / "e"
    mine.write_text(text)
    succeeded("sweep", mine, "train.steps=20", "--out", folder)
    ids = [cell.id for cell in open_experiment(folder).cells]
    for again in (mine, folder / "template.yaml", folder / "resolved.yaml"):
        changes = [] if again.name == "resolved.yaml" else ["train.steps=20"]
        assert "0 runs added" in succeeded("sweep", again, *changes, "--out", folder).errors
        assert (folder / "template.yaml").read_text() == text
    resolved = succeeded("sweep", folder / "resolved.yaml", "--list", "--json")
    assert [each["id"] for each in json.loads(resolved.output)] == ids


@pytest.mark.slow
def test_a_sweep_shows_every_cell_and_adds_only_what_is_new(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    listed = succeeded("sweep", "quickstart", "--list")
    assert not folder.exists()
    written = succeeded("sweep", "quickstart", "--out", folder)
    assert ("GB per rank" in listed.output, "GB per rank" in written.output) == (True, False)
    cells = open_experiment(folder).cells
    assert len(cells) == 6
    assert "6 cells" in listed.output
    assert all(cell.id in shown.output for cell in cells for shown in (listed, written))
    touched = folder / "runs" / cells[0].id / "metrics.jsonl"
    touched.write_text("kept")

    succeeded("sweep", "quickstart", "--out", folder)
    assert open_experiment(folder).cells == cells
    more = asyncpp("sweep", "quickstart", "matrix.seed=[0,1]", "--out", folder)
    assert "6 runs added" in more.errors
    assert "6 cells differ from the nearest run there in seed.\n" in more.errors
    assert {cell.id for cell in cells} < {cell.id for cell in open_experiment(folder).cells}
    assert touched.read_text() == "kept"
    for cell in open_experiment(folder).cells:
        config = open_experiment(folder).run(cell.id).config()
        assert cell.id.endswith(config_hash(config)[:8])
    assert json.loads((folder / "experiment.json").read_text())["format"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["train.steps=7"], "6 cells differ from the nearest run there in train.steps"),
        (
            ["optimizer.lr=0.5", "matrix.seed=[0,3]"],
            "6 cells differ from the nearest run there in optimizer.lr; "
            "6 cells differ from the nearest run there in optimizer.lr, seed",
        ),
    ],
)
def test_a_refused_sweep_says_which_keys_make_its_ids_new(
    tmp_path: Path, changes: list[str], told: str
) -> None:
    folder = tmp_path / "e"
    succeeded("sweep", "quickstart", "--out", folder)
    before = contents(folder)
    assert told in refusal("sweep", "quickstart", *changes, "--out", folder)
    assert contents(folder) == before


@pytest.mark.slow
def test_a_disk_that_is_full_before_the_last_run_leaves_no_half_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a folder that does not have its name yet are written in place, and others are replaced."""
    (tmp_path / "x").mkdir()
    folder, places = tmp_path / "x" / "e", list[str]()

    def half(file: Path, content: bytes) -> None:
        places.append(str(file))
        with file.open("wb") as opened:
            opened.write(content[: len(content) // 2 if len(places) > 3 else None])
        if len(places) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", half)
        assert "config.yaml" in asyncpp("sweep", "quickstart", "--out", folder).errors
    assert len(places) == 4
    assert not list((tmp_path / "x").iterdir())
    succeeded("sweep", "quickstart", "--out", folder)
    monkeypatch.setattr(Path, "write_bytes", half)
    succeeded("sweep", "quickstart", "matrix.seed=[0,1]", "--out", folder)
    assert len(places) == 4


def test_every_shipped_template_is_listed_and_shown() -> None:
    listed = asyncpp("templates", "list")
    for name in ("quickstart", "nano", "micro", "135m", "360m", "local"):
        assert name in listed.output
        assert asyncpp("templates", "show", name).output.strip()


@pytest.mark.parametrize("name", template_names("experiments"))
def test_every_cell_of_a_shipped_experiment_is_a_run(name: str) -> None:
    assert expand(load(name, []))
