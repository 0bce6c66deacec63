"""Models of experiments: the user's own, and the settings that a model recommends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.templates import cells_of

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.matrix import check_cells, expand
from asyncpp_cli.experiment.shipped import TEMPLATES_FOLDER, recommended_settings, template_names
from asyncpp_cli.experiment.template import load
from asyncpp_cli.runs.settings import get


def test_a_model_of_the_users_own_stands_beside_the_template(tmp_path: Path) -> None:
    (tmp_path / "wide.yaml").write_text("{layers: 2, width: 64, heads: 2, kv_heads: 2, mlp_width: 128}")
    (cell,) = cells_of(tmp_path, {"model": "wide.yaml", "schedule": "2bw", "optimizer": "adamw"})
    assert (cell.cell.axes["model"], cell.config.model.width) == ("wide", 64)


def test_a_model_recommends_what_nothing_else_sets(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        (TEMPLATES_FOLDER / "models" / "micro.yaml").read_text()
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
        ("{site.threads: 3}", "recommended: site.threads cannot be recommended"),
        ("[1]", "recommended must map keys to values"),
    ],
)
def test_a_recommendation_that_is_no_setting_is_refused(section: str, says: str, tmp_path: Path) -> None:
    model = (TEMPLATES_FOLDER / "models" / "micro.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(f"{model}recommended: {section}\n")
    template = tmp_path / "experiment.yaml"
    template.write_text("matrix: {schedule: 1f1b, optimizer: adamw}\nmodel: mine.yaml\ntrain.steps: 3\n")
    with pytest.raises(UserError, match=re.escape(says)):
        expand(load(str(template), []))


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
    recommended = recommended_settings(name, None)
    assert all(get(cell.config, key) == value for cell in cells for key, value in recommended.items())
