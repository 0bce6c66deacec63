"""`speed_steps`: of synchronous cells with the same numbers, one trains to its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import asyncpp, succeeded
from support.small_runs import TEXT, Rows, small_config
from support.templates import cells_of

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.matrix import ResolvedCell
from asyncpp_cli.experiment.speed_runs import loss_givers
from asyncpp_cli.runs.experiment_folder import open_experiment
from schedules import FAMILY
from stages.config.run_config import changed
from stages.trainer import replay

UNTIED = tuple(
    name for name, schedule in FAMILY.items() if schedule.synchronous and name not in ("1f1b", "dualpipe-v")
)

MATRIX: dict[str, Any] = {
    "matrix": {"schedule": ["2bw", "1f1b", "zb-v", "interleaved-1f1b"], "seed": [0, 1]},
    "overrides": [{"when": {"schedule": "interleaved-1f1b"}, "set": {"schedule.chunks": 2}}],
    "optimizer": "muon",
    "train": {"steps": 40},
    "speed_steps": 10,
}


def lengths(cells: list[ResolvedCell]) -> list[tuple[str, int, int]]:
    return [(each.config.schedule.name, each.config.seed, each.config.train.steps) for each in cells]


def test_the_first_synchronous_schedule_trains_to_its_end(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, MATRIX)
    assert lengths(cells) == [
        ("2bw", 0, 40),
        ("2bw", 1, 40),
        ("1f1b", 0, 40),
        ("1f1b", 1, 40),
        ("zb-v", 0, 10),
        ("zb-v", 1, 10),
        ("interleaved-1f1b", 0, 10),
        ("interleaved-1f1b", 1, 10),
    ]
    ids = [each.cell.id for each in cells]
    assert [each.cell.loss_of for each in cells] == [None] * 4 + [ids[2], ids[3]] * 2
    # The runs are those that a template with so few steps would have.
    whole = cells_of(tmp_path, MATRIX, "speed_steps=null", "train.steps=10")
    assert ids[4:] == [each.cell.id for each in whole[4:]]


def test_one_speed_run_serves_an_arm_of_several_lengths(tmp_path: Path) -> None:
    axes = {"train.steps": [30, 40], "schedule": ["1f1b", "gpipe"]}
    cells = cells_of(tmp_path, {"matrix": axes, "optimizer": "muon", "speed_steps": 12})
    assert lengths(cells) == [("1f1b", 0, 30), ("gpipe", 0, 12), ("1f1b", 0, 40)]
    assert cells[1].cell.axes["train.steps"] == 12


def test_a_sweep_writes_which_run_gives_the_loss_and_says_so(tmp_path: Path) -> None:
    template = tmp_path / "template.yaml"
    template.write_text(json.dumps({"model": "micro", **MATRIX}))
    swept = succeeded("sweep", template, "--out", tmp_path / "e", "--json")
    note = "zb-v, interleaved-1f1b: short runs of 10 steps, made only for their speed; their loss is that of"
    assert note in swept.errors
    written = json.loads((tmp_path / "e" / "experiment.json").read_text())["cells"]
    assert [cell["loss_of"] for cell in written] == [cell["loss_of"] for cell in json.loads(swept.output)]
    # The folder's resolved template makes the same cells.
    again = succeeded("sweep", tmp_path / "e" / "resolved.yaml", "--out", tmp_path / "e")
    assert "0 runs added" in again.errors
    assert json.loads((tmp_path / "e" / "experiment.json").read_text())["cells"] == written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speed_steps": 9}, "speed_steps must be a whole number from 10 on, or null, not 9"),
        ({"speed_steps": True}, "speed_steps must be a whole number from 10 on"),
        ({"speed_steps": 40}, "speed_steps is 40, and zb-v has 40 steps (train.steps) in all"),
        ({"train": {"steps": 40, "eval_interval": 1}}, "with a drain after every step"),
        ({"matrix": {"schedule": "2bw"}}, "no cell has a synchronous schedule"),
        ({"matrix": {"schedule": ["1f1b", "2bw"]}}, "1f1b is the only synchronous layout"),
        (
            {"matrix": {"schedule": ["1f1b", "looped-bfs"]}},
            "looped-bfs has not the numbers of 1f1b to the bit: it adds the gradients",
        ),
        ({"train": {"steps": 40, "clip": "stage"}}, "train.clip is stage, and their stages differ"),
        *(
            ({"overrides": [{"when": {"schedule": "zb-v"}, "set": {key: value}}]}, f"differs in {key}")
            for key, value in (
                ("schedule.microbatches", 8),
                ("optimizer", "adamw"),
                ("parallel.data", 2),
                ("train.precision", "bfloat16"),
                ("train.microbatch_size", 4),
            )
        ),
    ],
)
def test_what_has_no_meaning_or_other_numbers_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        cells_of(tmp_path, MATRIX | changes)
    text = str(refused.value).replace("optimizer.name", "optimizer")
    assert text.startswith(f"{tmp_path / 'template.yaml'}: speed_steps")
    assert message in text
    assert "\n" not in text


def test_a_tuning_trains_every_candidate_to_its_end(tmp_path: Path) -> None:
    over = ("--over", "optimizer.lr=[8e-3,1.6e-2]", "--out", tmp_path / "tuned")
    planned = json.loads(succeeded("tune", "verdict", *over, "--dry-run", "--json").output)
    assert planned["rungs"][-1]["until"] == "900, 1200, 1600"


@pytest.mark.parametrize(
    ("leading", "names", "settings"),
    [
        ("1f1b", UNTIED, {"clip": "global"}),
        ("1f1b", UNTIED, {"clip": "stage"}),
        ("zb-v", ("v-half", "dualpipe-v"), {"tied": True}),
        ("zb-v", ("1f1b", "dualpipe-v"), {"tied": True, "shard_head": True}),
        ("1f1b", ("gpipe", "zero-bubble"), {"tied": True, "stages": 1}),
    ],
)
def test_numbers_that_are_called_the_same_are(
    leading: str, names: tuple[str, ...], settings: dict[str, Any], tmp_path: Path
) -> None:
    """To the bit, and those that are refused are not."""
    text = tmp_path / "text"
    # Other bytes than those of ASCII, because each shard of a tied matrix needs tokens of its own.
    text.write_bytes(bytes((2 * byte) % 256 for byte in TEXT.encode()))

    def config(name: str) -> Any:
        chunks = 2 if "chunks" in FAMILY[name].options else 1
        options: dict[str, Any] = {"microbatches": 4, "steps": 11, "eval_interval": 20, "clip_norm": 0.3}
        return small_config(name, text=text, chunks=chunks, optimizer="muon", **options, **settings)

    def trained(name: str) -> tuple[Any, ...]:
        short = config(name)
        short = changed(short, {"train.steps": 2})
        result = replay(short, recorder=Rows())
        return result.train_losses, result.val_losses, {k: v.tolist() for k, v in result.weights.items()}

    def accepted(name: str) -> bool:
        try:
            return loss_givers([config(leading), config(name)], steps=10, source="t.yaml") == [None, 0]
        except UserError:
            return False

    whole = trained(leading)
    same = {name: trained(name) == whole for name in names}
    assert same == {name: accepted(name) for name in names}
    assert set(same.values()) == {True, False}


@pytest.mark.slow
def test_runs_for_the_speed_name_the_fastest_synchronous_layout_in_the_verdict(
    tmp_path: Path,
) -> None:
    template = tmp_path / "template.yaml"
    content = {
        "model": "micro",
        "parallel": {"stages": 1},
        "matrix": {"schedule": ["1f1b", "zb-v", "2bw"], "train.steps": [20, 40, 80], "seed": [0, 1]},
        "exclude": [
            {"schedule": ["1f1b", "zb-v"], "train.steps": [20, 80]},
            {"schedule": "2bw", "train.steps": 40},
        ],
        "optimizer": {"name": "muon", "lr": 1e-2},
        "data": {"context": 32},
        "train": {"microbatch_size": 2, "eval_interval": 1000, "checkpoint_interval": 0, "compile": False},
        "speed_steps": 10,
    }
    template.write_text(json.dumps(content))
    folder = tmp_path / "e"
    succeeded("sweep", template, "--out", folder)
    # Runs of one stage, in this process: a replay would measure no speed.
    for run in open_experiment(folder).runs:
        succeeded("train", run.folder)
    cells = json.loads(asyncpp("report", folder, "--format", "json").output)
    speeds = {
        cell["schedule"]: cell["tokens_per_second"] for cell in cells if cell["schedule"] in ("1f1b", "zb-v")
    }
    fastest = max(speeds, key=lambda name: speeds[name])
    [verdict] = next(cell["verdicts"] for cell in cells if cell["schedule"] == "2bw" and cell["verdicts"])
    assert verdict["fastest_synchronous"] == fastest
    # Noise may leave the steps open.
    if verdict["steps_ratio"] is not None:
        assert verdict["time_ratio"] == pytest.approx(verdict["steps_ratio"] / verdict["speed_ratio"])
        assert f"the fastest synchronous schedule that was run, {fastest}" in verdict["sentence"]
    table = succeeded("report", folder).output
    assert "Loss of 1f1b; zb-v ran 10 steps for its speed" in " ".join(table.split())
