"""From a template to cells."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from support.templates import cells_of

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.matrix import ResolvedCell, expand
from asyncpp_cli.experiment.template import load, text_of
from asyncpp_cli.runs.config_file import config_text, read_config
from asyncpp_cli.runs.settings import config_hash


def points(cells: list[ResolvedCell], *keys: str) -> list[tuple[object, ...]]:
    return [tuple(resolved.cell.axes[key] for key in keys) for resolved in cells]


def test_the_cells_are_the_product_in_the_order_of_the_axes(tmp_path: Path) -> None:
    cells = cells_of(
        tmp_path, {"matrix": {"schedule": ["1f1b", "2bw"], "optimizer": ["adamw", "muon"], "seed": [1, 0]}}
    )
    expected = list(itertools.product(["1f1b", "2bw"], ["adamw", "muon"], [1, 0]))
    assert points(cells, "schedule", "optimizer", "seed") == expected
    assert [resolved.config.seed for resolved in cells] == [seed for _, _, seed in expected]
    assert all(resolved.config.train.steps == 3 for resolved in cells)
    assert all(resolved.config.model.width == 32 for resolved in cells)


def test_shorthands_are_the_dotted_keys(tmp_path: Path) -> None:
    short = cells_of(
        tmp_path,
        {"schedule": "2bw", "matrix": {"optimizer": ["adamw", "muon"], "error_feedback": [False, True, 0.5]}},
    )
    long = cells_of(
        tmp_path,
        {
            "schedule": {"name": "2bw"},
            "matrix": {"optimizer.name": ["adamw", "muon"], "error_feedback.coefficient": [0, 1, 0.5]},
        },
    )
    assert [resolved.cell for resolved in short] == [resolved.cell for resolved in long]
    assert points(short, "error_feedback") == [(0.0,), (1.0,), (0.5,)] * 2


def test_zipped_axes_advance_together_as_one_axis_of_the_product(tmp_path: Path) -> None:
    cells = cells_of(
        tmp_path,
        {
            "schedule": "1f1b",
            "matrix": {"seed": [0, 1]},
            "zip": {"optimizer": ["adamw", "muon"], "optimizer.lr": [1e-3, 2e-2]},
        },
    )
    assert points(cells, "seed", "optimizer", "optimizer.lr") == [
        (0, "adamw", 1e-3),
        (0, "muon", 2e-2),
        (1, "adamw", 1e-3),
        (1, "muon", 2e-2),
    ]


def test_exclude_takes_what_it_describes_in_part_and_include_adds(tmp_path: Path) -> None:
    cells = cells_of(
        tmp_path,
        {
            "matrix": {"schedule": ["1f1b", "gpipe", "2bw"], "optimizer": "adamw", "error_feedback": [0, 1]},
            "exclude": [
                {"schedule": ["1f1b", "gpipe"], "error_feedback": True},
                {"schedule": "gpipe", "seed": 7},
            ],
            # Includes are not excluded: who adds a cell by hand wants it.
            "include": [{"schedule": "2bw", "optimizer": "muon", "train.steps": 5}],
        },
    )
    assert points(cells, "schedule", "optimizer", "error_feedback", "train.steps") == [
        ("1f1b", "adamw", 0.0, 3),
        ("gpipe", "adamw", 0.0, 3),
        ("2bw", "adamw", 0.0, 3),
        ("2bw", "adamw", 1.0, 3),
        ("2bw", "muon", 0.0, 5),
    ]


def test_include_alone_needs_no_matrix(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, {"optimizer": "muon", "include": [{"schedule": "2bw"}, {"schedule": "1f1b"}]})
    assert points(cells, "schedule", "optimizer") == [("2bw", "muon"), ("1f1b", "muon")]


def test_overrides_apply_in_order_to_the_cells_they_describe(tmp_path: Path) -> None:
    cells = cells_of(
        tmp_path,
        {
            "schedule": "1f1b",
            "matrix": {"optimizer": ["adamw", "muon"], "model": ["micro", "nano"]},
            "overrides": [
                {"when": {"optimizer": "muon"}, "set": {"optimizer": {"lr": 0.5}}},
                {"when": {"optimizer.lr": 0.5, "model": "nano"}, "set": {"optimizer.lr": 0.25}},
                {"set": {"train.clip": "none"}},
            ],
        },
    )
    assert [resolved.config.optimizer.lr for resolved in cells] == [2e-3, 2e-3, 0.5, 0.25]
    assert {resolved.config.train.clip for resolved in cells} == {"none"}


def test_the_command_line_has_the_last_word(tmp_path: Path) -> None:
    content = {
        "schedule": "1f1b",
        "matrix": {"optimizer": ["adamw", "muon"], "model": ["micro"]},
        "overrides": [{"when": {"optimizer": "muon"}, "set": {"optimizer.lr": 0.5}}],
    }
    changes = ["optimizer.lr=1e-3", "matrix.seed=[3,4]", "schedule=2bw", "model.layers=7", "train.steps=9"]
    cells = cells_of(tmp_path, content, *changes)
    assert points(cells, "optimizer", "seed") == [("adamw", 3), ("adamw", 4), ("muon", 3), ("muon", 4)]
    for resolved in cells:
        config = resolved.config
        assert (config.optimizer.lr, config.schedule.name) == (1e-3, "2bw")
        assert (config.model.layers, config.model.width, config.train.steps) == (7, 32, 9)
    (only,) = cells_of(tmp_path, content, "optimizer=muon", "matrix.seed=3")
    assert only.cell.axes["optimizer"] == "muon"


def test_the_template_as_changed_gives_the_same_cells(tmp_path: Path) -> None:
    template = load("quickstart", ["matrix.seed=[0,1]", "optimizer.lr=1e-3", "model=micro"])
    saved = tmp_path / "saved.yaml"
    saved.write_text(text_of(template))
    assert expand(load(str(saved), [])) == expand(template)


def test_a_list_of_numbers_is_one_value(tmp_path: Path) -> None:
    cuts = [[3, 1], None, [1.5, 2.5]]
    cells = cells_of(tmp_path, {"matrix": {"parallel.cut": cuts}, "schedule": "1f1b", "optimizer": "adamw"})
    assert [cell.config.parallel.cut for cell in cells] == cuts
    assert [cell.cell.axes["parallel.cut"] for cell in cells] == ["3-1", None, "1.5-2.5"]
    assert len({config_hash(cell.config) for cell in cells}) == 3
    [same] = cells_of(tmp_path, {"parallel.cut": [3.0, 1.0], "schedule": "1f1b", "optimizer": "adamw"})
    assert config_hash(same.config) == config_hash(cells[0].config)
    file = tmp_path / "config.yaml"
    file.write_text(config_text(cells[0].config))
    assert read_config(file) == cells[0].config
    common = {"matrix": {"parallel.cut": cuts}, "schedule": "1f1b", "optimizer": "adamw"}
    left = cells_of(tmp_path, common | {"exclude": [{"parallel.cut": [3, 1]}]})
    assert [cell.config.parallel.cut for cell in left] == cuts[1:]
    left = cells_of(tmp_path, common | {"exclude": [{"parallel.cut": [[3, 1], None]}]})
    assert [cell.config.parallel.cut for cell in left] == cuts[2:]
    assert [cell.config.parallel.cut for cell in cells_of(tmp_path, common, "parallel.cut=[2,2]")] == [[2, 2]]
    with pytest.raises(UserError, match=r"parallel.cut: must be a list of numbers or null, not \[3, \"1\"\]"):
        cells_of(tmp_path, common, 'parallel.cut=[3,"1"]')
