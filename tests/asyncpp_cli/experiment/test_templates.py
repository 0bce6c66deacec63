"""From a template to cells: axes, interpolation, models, templates to start from; and the cells' ids."""

from __future__ import annotations

import itertools
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import ASYNCPP, ran, refusal, succeeded
from support.templates import cells_of

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.cell_checks import check_cells
from asyncpp_cli.experiment.matrix import expand
from asyncpp_cli.experiment.shipped import TEMPLATES_FOLDER, read_model, template_names
from asyncpp_cli.experiment.template import load, text_of
from asyncpp_cli.runs.config_file import config_text, read_config
from asyncpp_cli.runs.settings import SITE, SettingError, config_hash, get, items, with_settings
from stages.config.run_config import RunConfig, changed
from stages.resolve.checks import ConfigError, check

TWO = ["adamw", "muon"]
POINTS: dict[str, tuple[dict[str, Any], str, list[tuple[object, ...]]]] = {
    "the product in the order of the axes": (
        {"matrix": {"schedule": ["1f1b", "2bw"], "optimizer": TWO, "seed": [1, 0]}},
        "schedule optimizer seed",
        list(itertools.product(["1f1b", "2bw"], TWO, [1, 0])),
    ),
    "zipped axes advance together as one axis of the product": (
        {
            "schedule": "1f1b",
            "matrix": {"seed": [0, 1]},
            "zip": {"optimizer": TWO, "optimizer.lr": [1e-3, 2e-2]},
        },
        "seed optimizer optimizer.lr",
        [(seed, *pair) for seed in (0, 1) for pair in (("adamw", 1e-3), ("muon", 2e-2))],
    ),
    # Includes are not excluded: who adds a cell by hand wants it.
    "exclude takes what it describes in part, and include adds": (
        {
            "matrix": {"schedule": ["1f1b", "gpipe", "2bw"], "optimizer": "adamw", "error_feedback": [0, 1]},
            "exclude": [
                {"schedule": ["1f1b", "gpipe"], "error_feedback": True},
                {"schedule": "gpipe", "seed": 7},
            ],
            "include": [{"schedule": "2bw", "optimizer": "muon", "train.steps": 5}],
        },
        "schedule optimizer error_feedback train.steps",
        [
            *((schedule, "adamw", 0.0, 3) for schedule in ("1f1b", "gpipe", "2bw")),
            ("2bw", "adamw", 1.0, 3),
            ("2bw", "muon", 0.0, 5),
        ],
    ),
    "include alone needs no matrix": (
        {"optimizer": "muon", "include": [{"schedule": "2bw"}, {"schedule": "1f1b"}]},
        "schedule optimizer",
        [("2bw", "muon"), ("1f1b", "muon")],
    ),
}


@pytest.mark.parametrize(("content", "keys", "points"), POINTS.values(), ids=POINTS)
def test_the_cells_of_a_template(
    content: dict[str, Any], keys: str, points: list[tuple[object, ...]], tmp_path: Path
) -> None:
    cells = cells_of(tmp_path, content)
    assert [tuple(resolved.cell.axes[key] for key in keys.split()) for resolved in cells] == points
    for resolved in cells:
        assert resolved.config.seed == resolved.cell.axes["seed"]
        assert resolved.config.train.steps == resolved.cell.axes.get("train.steps", 3)
        assert resolved.config.model.width == 32


def test_shorthands_are_the_dotted_keys(tmp_path: Path) -> None:
    short = {"schedule": "2bw", "matrix": {"optimizer": TWO, "error_feedback": [False, True, 0.5]}}
    matrix = {"optimizer.name": TWO, "error_feedback.coefficient": [0, 1, 0.5]}
    cells = [each.cell for each in cells_of(tmp_path, short)]
    assert cells == [
        each.cell for each in cells_of(tmp_path, {"schedule": {"name": "2bw"}, "matrix": matrix})
    ]
    assert [cell.axes["error_feedback"] for cell in cells] == [0.0, 1.0, 0.5] * 2


def test_overrides_apply_in_order_to_the_cells_they_describe(tmp_path: Path) -> None:
    content = {
        "schedule": "1f1b",
        "matrix": {"optimizer": TWO, "model": ["micro", "nano"]},
        "overrides": [
            {"when": {"optimizer": "muon"}, "set": {"optimizer": {"lr": 0.5}}},
            {"when": {"optimizer.lr": 0.5, "model": "nano"}, "set": {"optimizer.lr": 0.25}},
            {"set": {"train.clip": "none"}},
        ],
    }
    configs = [each.config for each in cells_of(tmp_path, content)]
    assert [config.optimizer.lr for config in configs] == [2e-3, 2e-3, 0.5, 0.25]
    assert {config.train.clip for config in configs} == {"none"}
    # The command line has the last word.
    changes = ["optimizer.lr=1e-3", "matrix.seed=[3,4]", "schedule=2bw", "model.layers=7", "train.steps=9"]
    cells = cells_of(tmp_path, content | {"matrix": {"optimizer": TWO, "model": ["micro"]}}, *changes)
    assert [(each.config.optimizer.name, each.config.seed) for each in cells] == [
        *itertools.product(TWO, [3, 4])
    ]
    for config in (each.config for each in cells):
        assert (config.optimizer.lr, config.schedule.name) == (1e-3, "2bw")
        assert (config.model.layers, config.model.width, config.train.steps) == (7, 32, 9)
    (only,) = cells_of(tmp_path, content, "optimizer=muon", "matrix.seed=3", "model=micro")
    assert only.cell.axes["optimizer"] == "muon"


def test_the_template_as_changed_gives_the_same_cells(tmp_path: Path) -> None:
    template = load("quickstart", ["matrix.seed=[0,1]", "optimizer.lr=1e-3", "model=micro"])
    saved = tmp_path / "saved.yaml"
    saved.write_text(text_of(template))
    assert expand(load(str(saved), [])) == expand(template)


def test_a_list_of_numbers_is_one_value(tmp_path: Path) -> None:
    cuts = [(3, 1), None, (1.5, 2.5)]
    common = {
        "matrix": {"parallel.cut": [[3, 1], None, [1.5, 2.5]]},
        "schedule": "1f1b",
        "optimizer": "adamw",
    }

    def cuts_of(content: dict[str, Any], *changes: str) -> list[object]:
        return [cell.config.parallel.cut for cell in cells_of(tmp_path, content, *changes)]

    assert cuts_of(common) == cuts
    cells = cells_of(tmp_path, common)
    assert [cell.cell.axes["parallel.cut"] for cell in cells] == ["3-1", None, "1.5-2.5"]
    assert len({config_hash(cell.config) for cell in cells}) == 3
    [same] = cells_of(tmp_path, {"parallel.cut": [3.0, 1.0], "schedule": "1f1b", "optimizer": "adamw"})
    assert config_hash(same.config) == config_hash(cells[0].config)
    file = tmp_path / "config.yaml"
    file.write_text(config_text(cells[0].config))
    assert read_config(file) == cells[0].config
    assert cuts_of(common | {"exclude": [{"parallel.cut": [3, 1]}]}) == cuts[1:]
    assert cuts_of(common | {"exclude": [{"parallel.cut": [[3, 1], None]}]}) == cuts[2:]
    assert cuts_of(common, "parallel.cut=[2,2]") == [(2, 2)]
    with pytest.raises(UserError, match=r"parallel.cut: must be a list of numbers or null, not \[3, \"1\"\]"):
        cuts_of(common, 'parallel.cut=[3,"1"]')


SHAPE = {"layers": 2, "width": 64, "heads": 2, "kv_heads": 2, "mlp_width": 128}
START: dict[str, Any] = {
    "variables": {"tokens": 20_480, "narrow": 32},
    "matrix": {"schedule": ["1f1b", "2bw"], "seed": [0, 1]},
    "optimizer": "muon",
    "model": "nano",
    "data": {"context": 128},
    "train": {"steps": 10, "microbatch_size": 2},
    "exclude": [{"schedule": "1f1b", "seed": 1}],
}


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        (["optimizer.lr=${mul:0.5,${optimizer.final_lr}}"], "optimizer.lr", 0.05),
        (["optimizer.lr=${mul:0.1,3}"], "optimizer.lr", 0.3),
        (["optimizer.lr=${mul:1e-3,1.1,1.1}"], "optimizer.lr", 0.00121),
        (["optimizer.lr=${div:0.3,3}"], "optimizer.lr", 0.1),
        (["optimizer.lr=${div:1,3}"], "optimizer.lr", 1 / 3),
        (["train.steps=${mul:0.07,100}"], "train.steps", 7),
        (["train.steps=${div:${variables.tokens},1024}"], "train.steps", 20),
        (["optimizer.warmup=${div:2,${train.steps}}"], "optimizer.warmup", 0.2),
        # Resolved when all settings of the cell are known, in whatever order they were given.
        (["optimizer.warmup=${div:2,${train.steps}}", "train.steps=40"], "optimizer.warmup", 0.05),
        (["optimizer.lr=${.final_lr}"], "optimizer.lr", 0.1),
        (["optimizer.lr=${..train.steps}"], "optimizer.lr", 10.0),
        (["train.eval_interval=${mul:2,${seed}}", "matrix.seed=[3]"], "train.eval_interval", 6),
        (["data.path=${oc.env:ASYNCPP_TEXTS}/1.10", "variables.x=1"], "data.path", "HERE/1.10"),
        (["optimizer.lr=${oc.decode:${oc.env:ASYNCPP_RATE}}"], "optimizer.lr", 1e-3),
        (["optimizer.lr=${oc.select:variables.rate,3}"], "optimizer.lr", 3.0),
        (["model.width=${mul:4,${variables.narrow}}"], "model.width", 128),
        (["model=${variables.size}", "+variables.size=micro"], "model.name", "micro"),
        (["optimizer=${variables.rule}", "variables.rule=adamw"], "optimizer.name", "adamw"),
        (["parallel.cut=['${variables.one}']", "variables.one=1"], "parallel.cut", (1,)),
        (["data.path=1.10"], "data.path", "HERE/1.10"),
        (["data.path=007"], "data.path", "HERE/007"),
        (["data.path='2024_01'"], "data.path", "HERE/2024_01"),
        (["data.path=a=b=c"], "data.path", "HERE/a=b=c"),
        (["matrix.data.path=[1.10]"], "data.path", "HERE/1.10"),
        (["~train.microbatch_size"], "train.microbatch_size", 8),
        (["train.checkpoint_interval=7", "~train.checkpoint_interval"], "train.checkpoint_interval", 100),
    ],
)
def test_values_are_resolved_and_text_stays_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], key: str, expected: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASYNCPP_TEXTS", str(tmp_path))
    monkeypatch.setenv("ASYNCPP_RATE", "1e-3")
    for name in ("1.10", "007", "2024_01", "a=b=c"):
        (tmp_path / name).write_text("some words to train on; " * 400)
    found = get(cells_of(tmp_path, START, *changes)[0].config, key)
    assert repr(found).replace(str(tmp_path), "HERE") == repr(expected)


def test_an_environment_variable_may_be_unset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be a number, not null"):
        cells_of(tmp_path, START, "optimizer.lr=${oc.env:ASYNCPP_UNSET,null}")


def test_conditions_see_what_is_resolved(tmp_path: Path) -> None:
    content = START | {
        "train": {"steps": "${mul:10,${seed}}", "microbatch_size": 2},
        "matrix": {"schedule": ["2bw"], "seed": [1, 2, 3]},
        "exclude": [{"train.steps": "${mul:2,10}"}],
        "overrides": [{"when": {"train.steps": 30}, "set": {"optimizer.lr": "${div:1,${train.steps}}"}}],
    }
    rates = {cell.config.train.steps: cell.config.optimizer.lr for cell in cells_of(tmp_path, content)}
    assert rates == {10: 2e-3, 30: 1 / 30}


def test_a_condition_without_effect_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = START | {
        "exclude": [{"schedule": "1f1b", "seed": 1}, {"schedule": ["gpipe", "paci"]}, {"seed": [1, 7]}],
        "overrides": [
            {"set": {"optimizer.lr": 1e-3}},
            {"when": {"optimizer": "lion"}, "set": {"optimizer.lr": 1e-4}},
            {"when": {"optimizer.lr": 1e-3, "seed": 0}, "set": {"train.steps": 20}},
            # Its cells are excluded.
            {"when": {"seed": 1}, "set": {"train.steps": 20}},
        ],
    }
    assert len(cells_of(tmp_path, content)) == 2
    said = [line.partition("template.yaml: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "exclude[1] (schedule=gpipe or paci) matches no cell",
        "overrides[1].when (optimizer=lion) matches no cell",
        "overrides[3].when (seed=1) matches no cell",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], ["overrides[0].when (seed=7)"]),
        (["matrix.schedule=[2bw]"], ["overrides[0].when (seed=7)"]),
        (["~matrix.error_feedback", "schedule=2bw"], ["overrides[0].when (seed=7)"]),
        (["matrix={schedule: 2bw, seed: 1}", "train.steps=20"], []),
        # What the command line itself states is its own mistake.
        (["matrix.seed=[1]", "exclude=[{schedule: 1f1b, seed: 3}]"], ["exclude[0] (schedule=1f1b, seed=3)"]),
    ],
)
def test_a_condition_on_what_the_command_line_changed_may_match_no_cell(
    changes: list[str], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = START | {
        "matrix": {"schedule": ["1f1b", "2bw"], "error_feedback": [False, True], "seed": [0]},
        "exclude": [{"schedule": "1f1b", "error_feedback": True}],
        "overrides": [{"when": {"seed": 7}, "set": {"optimizer.lr": 1e-3}}],
    }
    cells_of(tmp_path, content, *changes)
    found = [line.partition("template.yaml: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert found == [f"{each} matches no cell" for each in said]


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home" / "shape.yaml").write_text(yaml.safe_dump(SHAPE))
    for name in ("text", "other"):
        (tmp_path / "home" / name).write_text(f"some {name} words to train on; " * 400)
    content = START | {
        "matrix": {"schedule": ["2bw"], "model": ["~/shape.yaml", {"base": "~/shape.yaml", "layers": 4}]},
        "exclude": [],
        "data": {"context": 128, "path": "~/text", "validation": {"other": "~/other"}},
    }
    (tmp_path / "home" / "first.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "second.yaml").write_text("base: ~/first.yaml")
    first, second = expand(load("second.yaml", []))
    assert (first.config.model.width, second.config.model.layers) == (64, 4)
    text, other = (str(tmp_path / "home" / name) for name in ("text", "other"))
    assert (first.config.data.path, first.config.data.validation) == (text, {"other": other})
    # A shell expands `~` at the beginning of a word alone.
    succeeded("sweep", "~/first.yaml", "--out=~/out", "data.validation.more=~/other")
    succeeded("sweep", "second.yaml", "model=~/shape.yaml", "--out=~/three")
    succeeded("status", "~/out")
    assert {each.name for each in (tmp_path / "home").iterdir()} >= {"out", "three"}
    assert {each.name for each in tmp_path.iterdir()} == {"home", "second.yaml"}
    assert "no such home folder is known" in refusal("sweep", "second.yaml", "--out=~no.such/x")
    # `~` before a key removes it.
    succeeded("sweep", "second.yaml", "~train.microbatch_size", "--list")


def test_a_template_may_come_through_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shape.yaml").write_text(yaml.safe_dump(SHAPE))
    text = f"# My own words.\n{yaml.safe_dump(START | {'model': 'shape.yaml', 'exclude': []})}"
    (tmp_path / "text").write_text(text)
    program = shlex.join(ASYNCPP)
    for out, command in (("one", "sweep - {} <text"), ("two", "sweep <(cat text) {}")):
        done = ran("bash", "-c", f"{program} {command.format(f'seed=3 --out {out}')}")
        assert (done.code, done.errors) == (0, f"Wrote 2 runs to {out}. Next: asyncpp launch {out}\n"), done
        assert (tmp_path / out / "template.yaml").read_text() == text
    assert "piped template: stdin" in ran("bash", "-c", f"echo 'stdin: 3' | {program} sweep - --list").errors


def test_a_template_may_start_from_another(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "small.yaml").write_text(yaml.safe_dump(SHAPE))
    (tmp_path / "sub" / "start.yaml").write_text(yaml.safe_dump(START | {"model": "small.yaml"}))
    content = {
        "base": "sub/start.yaml",
        "variables": {"tokens": 4096},
        "matrix": {"seed": [5]},
        "exclude": None,
        # Over the axis of the other template.
        "schedule": "zero-bubble",
        "train.steps": "${div:${variables.tokens},1024}",
    }
    mine, shown = tmp_path / "mine.yaml", tmp_path / "shown.yaml"
    mine.write_text(yaml.safe_dump(content))
    [cell] = expand(load(str(mine), []))
    config = cell.config
    assert (config.schedule.name, config.seed, config.model.width) == ("zero-bubble", 5, 64)
    assert (config.train.steps, config.train.microbatch_size) == (4, 2)
    shown.write_text(succeeded("sweep", mine, "~exclude", "--list", "--resolve").output)
    merged = yaml.safe_load(shown.read_text())
    assert merged["variables"] == {"tokens": 4096, "narrow": 32}
    assert merged["matrix"] == {"schedule": ["zero-bubble"], "seed": [5]}
    # What is shown is a template of the same cells.
    assert [each.cell.id for each in expand(load(str(shown), []))] == [cell.cell.id]


def test_shared_parts_of_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCPP_RATE", "2e-3")
    file = tmp_path / "mine.yaml"
    file.write_text(
        "train: &shared {steps: 3, microbatch_size: 2}\n"
        "model: nano\noptimizer: {name: muon, lr: '${oc.decode:${oc.env:ASYNCPP_RATE}}'}\n"
        "matrix: {schedule: [2bw]}\n"
        "overrides: [{set: {train: {<<: *shared, steps: 4}}}]\n"
    )
    [cell] = expand(load(str(file), []))
    assert (cell.config.train.steps, cell.config.train.microbatch_size) == (4, 2)
    said = succeeded("sweep", file, "--out", tmp_path / "e")
    assert said.errors.count("ASYNCPP_RATE is '2e-3'") == 1
    # The run keeps the value: the environment may change.
    monkeypatch.delenv("ASYNCPP_RATE")
    [config] = (tmp_path / "e").glob("runs/*/config.yaml")
    assert yaml.safe_load(config.read_text())["optimizer"]["lr"] == 2e-3


def test_a_model_is_a_name_a_shape_or_a_file_beside_the_template(tmp_path: Path) -> None:
    (tmp_path / "wide.yaml").write_text(yaml.safe_dump(SHAPE))
    models = [
        "nano",
        {"base": "nano", "layers": 3},
        SHAPE,
        SHAPE | {"name": "17m", "width": "${variables.narrow}"},
        "wide.yaml",
    ]
    cells = cells_of(tmp_path, START | {"matrix": {"schedule": ["2bw"], "model": models}})
    assert [
        (each.config.model.name, each.config.model.layers, each.config.model.width) for each in cells
    ] == [
        ("nano", 4, 128),
        ("nano-3x128", 3, 128),
        ("2x64", 2, 64),
        ("17m", 2, 32),
        ("wide", 2, 64),
    ]
    assert cells[-1].cell.axes["model"] == "wide"
    matrix = {"matrix": {"schedule": ["2bw"]}, "model": SHAPE}
    [alone] = cells_of(tmp_path, START | matrix, "model.layers=5")
    assert (alone.config.model.name, alone.config.model.layers) == ("5x64", 5)
    assert alone.cell.id.startswith("2bw-muon-ef0-5x64-s0-")


def recommending(folder: Path, recommended: str) -> Path:
    """A template of a model that recommends these settings."""
    model = (TEMPLATES_FOLDER / "models" / "micro.yaml").read_text()
    (folder / "mine.yaml").write_text(f"{model}recommended: {recommended}\n")
    template = folder / "experiment.yaml"
    template.write_text(
        "matrix: {schedule: [1f1b, 2bw], model: [mine.yaml, nano]}\n"
        "optimizer: adamw\ntrain: {steps: 3, precision: float32}\n"
        "overrides: [{when: {schedule: 2bw}, set: {train.clip: stage}}]\n"
    )
    return template


def test_a_model_recommends_what_nothing_else_sets(tmp_path: Path) -> None:
    template = recommending(
        tmp_path, "{data.context: 64, optimizer: {lr: 5e-4}, train: {clip: none, precision: bfloat16}}"
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
        ("{site.threads: 3}", "recommended: site.threads cannot be recommended"),
        ("[1]", "recommended must map keys to values"),
    ],
)
def test_a_recommendation_that_is_no_setting_is_refused(section: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        expand(load(str(recommending(tmp_path, section)), []))


@pytest.mark.parametrize("name", template_names("models"))
def test_every_shipped_size_renders_with_what_it_recommends(name: str, tmp_path: Path) -> None:
    template = tmp_path / "experiment.yaml"
    # Tied embeddings need the model's two ends on one rank.
    schedules = "[zb-v, 2bw-v]" if name.endswith("-tied") else "[1f1b, 2bw]"
    template.write_text(
        f"matrix: {{schedule: {schedules}, optimizer: muon}}\ntrain.steps: 3\nparallel.stages: 4\n"
    )
    loaded = load(str(template), [f"model={name}"])
    cells = expand(loaded)
    check_cells(loaded, cells)
    recommended = read_model(name, beside=None).recommended
    assert all(get(cell.config, key) == value for cell in cells for key, value in recommended.items())


QUICKSTART = expand(load("quickstart", []))
PLAIN = QUICKSTART[4].config


def test_ids_say_what_a_run_is_and_are_safe_in_a_path(tmp_path: Path) -> None:
    # Versions of the program agree on them, or they would train everything anew.
    assert [resolved.cell.id for resolved in QUICKSTART] == [
        "1f1b-muon-ef0-nano-s0-d01f6ade",
        "2bw-muon-ef0-nano-s0-3350eb9e",
        "2bw-muon-ef1-nano-s0-fd1bed7d",
        "1f1b-adamw-ef0-nano-s0-189d2753",
        "2bw-adamw-ef0-nano-s0-9e981ded",
        "2bw-adamw-ef1-nano-s0-6bf85f93",
    ]
    text = tmp_path / "my text; rm -rf"
    text.write_text("words")
    matrix = {"schedule": "2bw", "optimizer": "muon", "error_feedback": True, "optimizer.lr": [2e-3]}
    [resolved] = cells_of(tmp_path, {"matrix": matrix}, f"matrix.data.path=['{text}']")
    assert resolved.cell.id.startswith("2bw-muon-ef1-micro-s0-lr=0.002-path=my_text_rm_-rf-")
    assert resolved.cell.id.endswith(config_hash(resolved.config)[:8])
    # A cell is the run that its values written out are.
    cell = ["matrix.seed=3", "schedule=2bw"]
    hashes = [
        config_hash(cells_of(tmp_path, START, *cell, f"optimizer.lr={lr}")[0].config)
        for lr in ("${div:${seed},1000}", "3e-3")
    ]
    assert hashes[0] == hashes[1]


def with_value(key: str, value: Any) -> RunConfig:
    return changed(PLAIN, {key: value})


@pytest.mark.parametrize(
    ("key", "value", "begins"),
    [
        ("train.recompute", "none", "9e981ded"),
        ("train.recompute", "full", "0724b0e2"),
        ("train.compile", None, "9e981ded"),
        ("train.compile", False, "9e981ded"),
    ],
)
def test_ids_of_values_that_are_hashed_as_others(key: str, value: object, begins: str) -> None:
    assert config_hash(with_value(key, value)).startswith(begins)


@pytest.mark.parametrize("value", [True, False, 1, "maybe"])
def test_recompute_takes_its_names_alone(value: object) -> None:
    def check_assigned() -> None:
        check(with_settings(PLAIN, {"train.recompute": value}))

    with pytest.raises((SettingError, ConfigError), match=r"must be text|accepted: none, selective, full"):
        check_assigned()


def test_every_key_counts_where_it_is_set() -> None:
    """Those of the site, and the paths of what is known by its content, do not."""
    by_key = {key: config_hash(with_value(key, 0.5)) for key, _ in items(RunConfig())}
    of_site = {key for key in by_key if key.startswith(f"{SITE}.")}
    same = {key for key, found in by_key.items() if found == config_hash(PLAIN)}
    assert same == {"model.init", "data.sha256", *of_site}
    assert len(set(by_key.values())) == len(by_key) - len(same) + 1


@given(
    lr=st.floats(min_value=1e-12, max_value=1e12),
    seed=st.integers(min_value=0, max_value=2**63 - 1),
    path=st.none() | st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1),
)
@settings(max_examples=50, deadline=None)
@pytest.mark.slow
def test_a_configuration_is_read_as_it_was_written(lr: float, seed: int, path: str | None) -> None:
    config = changed(PLAIN, {"optimizer.lr": lr, "seed": seed, "data.path": path})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config_text(config), encoding="utf-8")
        read = read_config(file)
    assert read == config
    assert isinstance(read, RunConfig)
    assert config_hash(read) == config_hash(config)
