"""From a template to cells."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from pathlib import Path

import pytest
import yaml
from command_line import asyncpp
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpp_cli.errors import UserError
from asyncpp_cli.matrix import ResolvedCell, check, expand
from asyncpp_cli.runs import open_experiment
from asyncpp_cli.settings import config_hash, config_text, copy_of, get, read_config
from asyncpp_cli.template_file import load, text_of
from asyncpp_cli.templates import SHIPPED, names, recommended_settings
from stages.config import RunConfig

BASE = {"model": "micro", "train": {"steps": 3}}


def cells_of(folder: Path, content: dict[str, object], *changes: str) -> list[ResolvedCell]:
    """The cells of a template with this content."""
    file = folder / "template.yaml"
    file.write_text(yaml.safe_dump(BASE | content, sort_keys=False))
    return expand(load(str(file), changes))


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


def test_a_model_of_the_users_own_stands_beside_the_template(tmp_path: Path) -> None:
    (tmp_path / "wide.yaml").write_text("{layers: 2, width: 64, heads: 2, kv_heads: 2, mlp_width: 128}")
    (cell,) = cells_of(tmp_path, {"model": "wide.yaml", "schedule": "2bw", "optimizer": "adamw"})
    assert (cell.cell.axes["model"], cell.config.model.width) == ("wide", 64)


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


def test_a_sweep_shows_every_cell_and_adds_only_what_is_new(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    listed = asyncpp("sweep", "quickstart", "--list")
    assert listed.code == 0
    assert not folder.exists()
    written = asyncpp("sweep", "quickstart", "--out", folder)
    assert written.output == listed.output
    cells = open_experiment(folder).cells
    assert len(cells) == 6
    assert "6 cells" in listed.output
    assert all(cell.id in listed.output for cell in cells)
    touched = folder / "runs" / cells[0].id / "metrics.jsonl"
    touched.write_text("kept")

    again = asyncpp("sweep", "quickstart", "--out", folder)
    assert again.code == 0
    assert open_experiment(folder).cells == cells
    more = asyncpp("sweep", "quickstart", "matrix.seed=[0,1]", "--out", folder)
    assert "6 runs added" in more.errors
    assert {cell.id for cell in cells} < {cell.id for cell in open_experiment(folder).cells}
    assert touched.read_text() == "kept"
    for cell in open_experiment(folder).cells:
        config = open_experiment(folder).run(cell.id).config()
        assert cell.id.endswith(config_hash(config)[:8])
    assert json.loads((folder / "experiment.json").read_text())["format"] == 1


def test_every_shipped_template_is_listed_and_shown() -> None:
    listed = asyncpp("templates", "list")
    for name in ("quickstart", "nano", "micro", "135m", "360m", "local"):
        assert name in listed.output
        assert asyncpp("templates", "show", name).output.strip()


@pytest.mark.parametrize("name", names("experiments"))
def test_every_cell_of_a_shipped_experiment_is_a_run(name: str) -> None:
    assert expand(load(name, []))


def test_a_list_of_integers_is_one_value(tmp_path: Path) -> None:
    cuts = [[3, 1], None, [1, 3]]
    cells = cells_of(tmp_path, {"matrix": {"parallel.cut": cuts}, "schedule": "1f1b", "optimizer": "adamw"})
    assert [cell.config.parallel.cut for cell in cells] == cuts
    assert [cell.cell.axes["parallel.cut"] for cell in cells] == ["3-1", None, "1-3"]
    assert len({config_hash(cell.config) for cell in cells}) == 3
    file = tmp_path / "config.yaml"
    file.write_text(config_text(cells[0].config))
    assert read_config(file) == cells[0].config
    common = {"matrix": {"parallel.cut": cuts}, "schedule": "1f1b", "optimizer": "adamw"}
    left = cells_of(tmp_path, common | {"exclude": [{"parallel.cut": [3, 1]}]})
    assert [cell.config.parallel.cut for cell in left] == cuts[1:]
    left = cells_of(tmp_path, common | {"exclude": [{"parallel.cut": [[3, 1], None]}]})
    assert [cell.config.parallel.cut for cell in left] == cuts[2:]
    assert [cell.config.parallel.cut for cell in cells_of(tmp_path, common, "parallel.cut=[2,2]")] == [[2, 2]]
    with pytest.raises(
        UserError, match=r"parallel.cut: must be a list of integers or null, not \[3, \"1\"\]"
    ):
        cells_of(tmp_path, common, 'parallel.cut=[3,"1"]')


def test_a_model_recommends_what_nothing_else_sets(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        (SHIPPED / "models" / "micro.yaml").read_text()
        + "recommended: {data.context: 64, optimizer: {lr: 5e-4}, train: {clip: none, precision: bfloat16}}\n"
    )
    template = tmp_path / "experiment.yaml"
    template.write_text(
        "matrix: {schedule: [1f1b, 2bw], model: [mine.yaml, nano]}\n"
        "optimizer: adamw\ntrain: {steps: 3, precision: float32}\n"
        "overrides: [{when: {schedule: 2bw}, set: {train.clip: stage}}]\n"
    )
    configs = {
        (cell.config.schedule.name, cell.config.model.name): cell.config
        for cell in expand(load(str(template), ["optimizer.lr=1e-3"]))
    }
    mine = configs["1f1b", "mine"]
    assert (mine.data.context, mine.train.clip, mine.train.precision) == (64, "none", "float32")
    assert configs["2bw", "mine"].train.clip == "stage"
    assert (configs["1f1b", "nano"].data.context, configs["1f1b", "nano"].train.clip) == (128, "global")
    assert {config.optimizer.lr for config in configs.values()} == {1e-3}


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("{train.stepz: 3}", "recommended: train.stepz: unknown key; did you mean train.steps"),
        ("{optimizer.lr: fast}", "recommended: optimizer.lr: must be a number"),
        ("{site.threads: 3}", "recommended: site.threads is not the model's to say"),
        ("[1]", "recommended must map keys to values"),
    ],
)
def test_a_recommendation_that_is_no_setting_is_refused(section: str, says: str, tmp_path: Path) -> None:
    model = (SHIPPED / "models" / "micro.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(f"{model}recommended: {section}\n")
    template = tmp_path / "experiment.yaml"
    template.write_text("matrix: {schedule: 1f1b, optimizer: adamw}\nmodel: mine.yaml\ntrain.steps: 3\n")
    with pytest.raises(UserError, match=re.escape(says)):
        expand(load(str(template), []))


@pytest.mark.parametrize("name", names("models"))
def test_every_shipped_size_renders_with_what_it_recommends(name: str, tmp_path: Path) -> None:
    template = tmp_path / "experiment.yaml"
    template.write_text(
        "matrix: {schedule: [1f1b, 2bw], optimizer: muon}\ntrain.steps: 3\nparallel.stages: 4\n"
    )
    loaded = load(str(template), [f"model={name}"])
    cells = expand(loaded)
    check(loaded, cells)
    recommended = recommended_settings(name, None)
    assert all(get(cell.config, key) == value for cell in cells for key, value in recommended.items())
