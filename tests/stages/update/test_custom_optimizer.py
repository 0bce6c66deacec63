"""An optimizer of the user's own trains, resumes and is planned; mistakes are refused in one line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import asyncpp
from support.files import ROOT
from support.resumed import replay_twice, saving
from support.small_runs import Rows, in_processes, replayed, small_config

from asyncpp_cli.runs.config_file import config_text, read_config
from asyncpp_cli.runs.settings import assign, config_hash, get
from optimizers.build import build_optimizer
from stages.comm.process import Process
from stages.config.run_config import RunConfig
from stages.memory.estimate import course_of, stage_memory
from stages.pipeline.build import representative_programs
from stages.trainer import replay, train
from stages.validation import ConfigError, check

DOCS = ROOT / "docs" / "optimizers.md"
[EXAMPLE] = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)

BAD = """
import torch
from my_optimizers import RowNormalized

number = 3

def no_optimizer(groups, *, lr, weight_decay):
    return groups

def half(groups, *, lr, weight_decay):
    return RowNormalized(groups[:1], lr=lr, weight_decay=weight_decay)

def leaving(groups, *, lr, weight_decay):
    raise SystemExit(0)

class Failing(RowNormalized):
    def step(self):
        raise RuntimeError("no kernel\\nfor this")

class Listing(RowNormalized):
    def step(self):
        super().step()
        for state in self.state.values():
            state["history"] = [1, 2]

class Counting(RowNormalized):
    steps = 0
    def step(self):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] /= self.steps
        super().step()

class Shared(RowNormalized):
    def step(self):
        super().step()
        self.state["all"] = {"count": torch.zeros(3)}

class Asking(RowNormalized):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad.abs().max().item() >= 0:
                    self.state[parameter].setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run of the documented example, which other processes can import as well."""
    (tmp_path / "my_optimizers.py").write_text(EXAMPLE)
    (tmp_path / "bad_optimizers.py").write_text(BAD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    config = small_config("2bw", microbatches=2, steps=6)
    assign(config, {"optimizer.name": "my_optimizers:RowNormalized", "optimizer.options.beta": 0.8})
    return config


def trained(process: Process, config: RunConfig) -> dict[str, Any]:
    weights = train(config, process=process, recorder=Rows()).weights
    return {name: tensor.numpy() for name, tensor in weights.items()}


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.slow
def test_distributed_training_and_replay_have_the_same_bits(data: int, own: RunConfig) -> None:
    own.parallel.data = data
    own.parallel.stages = 2 // data
    check(own)
    rows = Rows()
    alone = replay(own, recorder=rows)
    losses = [row["train_loss"] for row in rows.of_kind("step")]
    assert losses[-1] < losses[0] - 0.05
    together: dict[str, Any] = {}
    for [weights] in in_processes(trained, [own], size=2):
        together |= weights
    assert together.keys() == alone.weights.keys()
    assert all(
        torch.equal(torch.from_numpy(together[name]), tensor) for name, tensor in alone.weights.items()
    )


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(data: int, own: RunConfig, tmp_path: Path) -> None:
    own.parallel.data = data
    replay_twice(saving(own), tmp_path / "checkpoints", step=2)


@pytest.mark.parametrize("name", ["my_optimizers:RowNormalized", "torch.optim:NAdam"])
def test_its_state_is_planned_as_it_is_measured(name: str, own: RunConfig) -> None:
    own.optimizer = replace(own.optimizer, name=name, options={})
    own.parallel.data = 2
    rows = replayed(own)
    memory = rows.memory
    planned = stage_memory(own, course_of(representative_programs(own)), gradient_buffers=[2, 2])
    assert [stage.optimizer for stage in planned] == memory["optimizer"]


def test_an_optimizer_that_asks_for_values_is_planned_by_a_smaller_step(own: RunConfig) -> None:
    from optimizers.custom import measured_values

    own.optimizer = replace(own.optimizer, name="bad_optimizers:Asking", options={})
    assert measured_values("bad_optimizers:Asking", "matrix", (1000, 300), {}) == 300_000


def test_its_groups_have_roles_and_their_own_peaks(own: RunConfig) -> None:
    parameters = {
        name: torch.nn.Parameter(torch.ones(4, 4)) for name in ("embedding.weight", "blocks.0.up.weight")
    }
    optimizer = build_optimizer(
        parameters, name=own.optimizer.name, lr=0.5, weight_decay=0.1, options={"beta": 0.7}
    )
    groups = {group["role"]: group for group in optimizer.param_groups}
    assert [groups[role]["weight_decay"] for role in ("matrix", "embedding")] == [0.1, 0.0]
    assert {group["peak_lr"] for group in groups.values()} == {0.5}
    assert {group["beta"] for group in groups.values()} == {0.7}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_package.module:make", "cannot be imported .*PYTHONPATH"),
        ("my_optimizers:Nothing", "cannot be imported"),
        ("my_optimisers:make", "no module 'my_optimisers'; did you mean my_optimizers"),
        ("torch.optm:SGD", "no module 'torch.optm'; did you mean torch.optim"),
        ("torch.optim:Muonn", "torch.optim has no 'Muonn'; did you mean Muon"),
        ("bad_optimizers:number", "is int, must be a function or a class"),
        ("bad_optimizers:no_optimizer", "returns list, must return a torch.optim.Optimizer"),
        ("bad_optimizers:half", "of 1 parameters, must be of the 5 given"),
        ("bad_optimizers:leaving", r"fails \(SystemExit: 0\)"),
        ("bad_optimizers:Failing", r"fails in a step \(RuntimeError: no kernel for this\)"),
        ("bad_optimizers:Listing", "keeps history, a list, which cannot be saved"),
        ("bad_optimizers:Shared", "keeps state that is of no parameter"),
        ("bad_optimizers:Counting", "steps differently after a checkpoint"),
    ],
)
def test_what_cannot_be_used_is_refused(name: str, says: str, own: RunConfig) -> None:
    own.optimizer = replace(own.optimizer, name=name, options={})
    with pytest.raises(ConfigError, match=says) as caught:
        check(own)
    assert caught.value.key == "optimizer.name"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"optimizer.beta1": 0.9}, "optimizer.beta1"),
        ({"optimizer.options.gamma": 1}, "optimizer.name"),
        ({"optimizer.name": "adamw"}, "optimizer.options.beta"),
    ],
)
def test_options_go_to_their_optimizer(settings: dict[str, Any], key: str, own: RunConfig) -> None:
    assign(own, settings)
    with pytest.raises(ConfigError) as caught:
        check(own)
    assert caught.value.key == key


def test_options_are_part_of_the_run(own: RunConfig, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(config_text(own))
    read = read_config(file)
    assert get(read, "optimizer.options.beta") == 0.8
    assert config_hash(read) == config_hash(own)
    assign(read, {"optimizer.options.beta": 0.9})
    assert config_hash(read) != config_hash(own)
    assert get(own, "optimizer.options.beta") == 0.8


@pytest.mark.slow
def test_sweep_and_plan_take_it_and_refuse_mistakes_in_one_line(own: RunConfig) -> None:
    swept = asyncpp(
        "sweep",
        "quickstart",
        "--list",
        "matrix.optimizer=[my_optimizers:RowNormalized]",
        "matrix.optimizer.options.beta=[0.5,0.9]",
        "matrix.error_feedback=[0]",
        "exclude=[]",
    )
    assert swept.code == 0, swept.errors
    assert "beta=0.5" in swept.output
    assert "beta=0.9" in swept.output
    planned = asyncpp("plan", "nano", "--gpus", "2", "--device", "h100", f"optimizer={own.optimizer.name}")
    assert planned.code == 0, planned.errors
    for change, says in (
        ("optimizer=bad_optimizers:Listing", "optimizer.name: bad_optimizers:Listing keeps history, a list"),
        ("optimizer.options=3", "optimizer.options: takes one option by name"),
    ):
        refused = asyncpp("sweep", "quickstart", "--list", "matrix.optimizer=[adamw]", change)
        assert refused.code == 2
        assert refused.errors.count("\n") == 1
        assert says in refused.errors
    plan = asyncpp("plan", "nano", "--gpus", "2", "--device", "h100", "optimizer=bad_optimizers:Failing")
    assert (plan.code, plan.errors.count("\n")) == (2, 1)
    assert "nano: optimizer.name: bad_optimizers:Failing fails in a step" in plan.errors
