"""Interpolation, a model's shape in a template, templates that start from others, and changes that remove."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command_line import succeeded

from asyncpp_cli.experiment.matrix import ResolvedCell, expand
from asyncpp_cli.experiment.template import load
from asyncpp_cli.runs.settings import config_hash, get

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


def cells(folder: Path, content: dict[str, Any], *changes: str) -> list[ResolvedCell]:
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(content))
    return expand(load(str(file), changes))


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        (["optimizer.lr=${mul:0.5,${optimizer.final_lr}}"], "optimizer.lr", 0.05),
        (["train.steps=${div:${variables.tokens},1024}"], "train.steps", 20),
        (["optimizer.warmup=${div:2,${train.steps}}"], "optimizer.warmup", 0.2),
        # Resolved when all settings of the cell are known, in whatever order they were given.
        (["optimizer.warmup=${div:2,${train.steps}}", "train.steps=40"], "optimizer.warmup", 0.05),
        (["optimizer.lr=${.final_lr}"], "optimizer.lr", 0.1),
        (["optimizer.lr=${..train.steps}"], "optimizer.lr", 10.0),
        (["train.eval_interval=${mul:2,${seed}}", "matrix.seed=[3]"], "train.eval_interval", 6),
        (["data.path=${oc.env:ASYNCPP_TEXTS}/1.10", "variables.x=1"], "data.path", "HERE/1.10"),
        (["optimizer.lr=${oc.decode:${oc.env:ASYNCPP_RATE}}"], "optimizer.lr", 1e-3),
        (["optimizer.lr=${oc.env:ASYNCPP_UNSET,null}"], "optimizer.lr", None),
        (["optimizer.lr=${oc.select:variables.rate,3}"], "optimizer.lr", 3.0),
        (["model.width=${mul:4,${variables.narrow}}"], "model.width", 128),
        (["model=${variables.size}", "+variables.size=micro"], "model.name", "micro"),
        (["optimizer=${variables.rule}", "variables.rule=adamw"], "optimizer.name", "adamw"),
        (["parallel.cut=['${variables.one}']", "variables.one=1"], "parallel.cut", [1]),
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
    if expected is None:
        with pytest.raises(Exception, match="must be a number, not null"):
            cells(tmp_path, START, *changes)
        return
    found = get(cells(tmp_path, START, *changes)[0].config, key)
    assert repr(found).replace(str(tmp_path), "HERE") == repr(expected)


def test_a_cell_is_the_run_that_its_values_written_out_are(tmp_path: Path) -> None:
    [resolved] = cells(tmp_path, START, "matrix.seed=3", "schedule=2bw", "optimizer.lr=${div:${seed},1000}")
    [plain] = cells(tmp_path, START, "matrix.seed=3", "schedule=2bw", "optimizer.lr=3e-3")
    assert config_hash(resolved.config) == config_hash(plain.config)


def test_conditions_see_what_is_resolved(tmp_path: Path) -> None:
    content = START | {
        "train": {"steps": "${mul:10,${seed}}", "microbatch_size": 2},
        "matrix": {"schedule": ["2bw"], "seed": [1, 2, 3]},
        "exclude": [{"train.steps": "${mul:2,10}"}],
        "overrides": [{"when": {"train.steps": 30}, "set": {"optimizer.lr": "${div:1,${train.steps}}"}}],
    }
    rates = {cell.config.train.steps: cell.config.optimizer.lr for cell in cells(tmp_path, content)}
    assert rates == {10: 2e-3, 30: 1 / 30}


def test_a_models_shape_may_stand_in_the_template(tmp_path: Path) -> None:
    models = [
        "nano",
        {"base": "nano", "layers": 3},
        SHAPE,
        SHAPE | {"name": "17m", "width": "${variables.narrow}"},
    ]
    content = START | {"matrix": {"schedule": ["2bw"], "model": models}}
    found = [cell.config.model for cell in cells(tmp_path, content)]
    assert [(each.name, each.layers, each.width) for each in found] == [
        ("nano", 4, 128),
        ("nano-3x128", 3, 128),
        ("2x64", 2, 64),
        ("17m", 2, 32),
    ]
    [alone] = cells(tmp_path, content | {"matrix": {"schedule": ["2bw"]}, "model": SHAPE}, "model.layers=5")
    assert (alone.config.model.name, alone.config.model.layers) == ("5x64", 5)
    assert alone.cell.id.startswith("2bw-muon-ef0-5x64-s0-")


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
    [cell] = cells(tmp_path, content)
    config = cell.config
    assert (config.schedule.name, config.seed, config.train.steps, config.model.width) == (
        "zero-bubble",
        5,
        4,
        64,
    )
    assert config.train.microbatch_size == 2
    shown = succeeded("sweep", tmp_path / "mine.yaml", "~exclude", "--list", "--resolve").output
    merged = yaml.safe_load(shown)
    assert merged["variables"] == {"tokens": 4096, "narrow": 32}
    assert merged["matrix"] == {"schedule": ["zero-bubble"], "seed": [5]}
    # What is shown is a template of the same cells.
    (tmp_path / "shown.yaml").write_text(shown)
    assert [each.cell.id for each in expand(load(str(tmp_path / "shown.yaml"), []))] == [cell.cell.id]


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
