"""A run's id and configuration file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.templates import cells_of

from asyncpp_cli.experiment.matrix import expand
from asyncpp_cli.experiment.template import load
from asyncpp_cli.runs.config_file import config_text, read_config
from asyncpp_cli.runs.settings import config_hash, copy_of
from stages.config.run_config import RunConfig


def test_ids_say_what_a_run_is_and_are_safe_in_a_path(tmp_path: Path) -> None:
    text = tmp_path / "my text; rm -rf"
    text.write_text("words")
    cells = cells_of(
        tmp_path,
        {
            "matrix": {
                "schedule": "2bw",
                "optimizer": "muon",
                "error_feedback": True,
                "optimizer.lr": [2e-3],
            },
            "data": {"path": str(text)},
        },
        f"matrix.data.path=['{text}']",
    )
    assert cells[0].cell.id.startswith("2bw-muon-ef1-micro-s0-lr=0.002-path=my_text_rm_-rf-")
    assert cells[0].cell.id.endswith(config_hash(cells[0].config)[:8])


@pytest.mark.parametrize("key", ["site.threads=2", "site.device=cpu", "site.timeout=5"])
def test_site_is_no_part_of_what_a_run_is(tmp_path: Path, key: str) -> None:
    content = {"schedule": "2bw", "optimizer": "adamw"}
    assert cells_of(tmp_path, content)[0].cell.id == cells_of(tmp_path, content, key)[0].cell.id
    assert cells_of(tmp_path, content)[0].cell.id != cells_of(tmp_path, content, "seed=1")[0].cell.id


QUICKSTART = expand(load("quickstart", ["exclude=[]", "error_feedback=false"]))[0].config


@given(
    lr=st.floats(min_value=1e-12, max_value=1e12),
    seed=st.integers(min_value=0, max_value=2**63 - 1),
    path=st.none() | st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1),
)
@settings(max_examples=50, deadline=None)
@pytest.mark.slow
def test_a_configuration_is_read_as_it_was_written(lr: float, seed: int, path: str | None) -> None:
    config = copy_of(QUICKSTART)
    config.optimizer.lr, config.seed, config.data.path = lr, seed, path
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config_text(config), encoding="utf-8")
        read = read_config(file)
    assert read == config
    assert isinstance(read, RunConfig)
    assert config_hash(read) == config_hash(config)
