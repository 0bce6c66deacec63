"""A user's own model, optimizer and schedule: they train as ours do, go on from a
checkpoint, and mistakes are refused in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import asyncpp
from support.files import ROOT
from support.planned import planned
from support.resumed import replay_twice, saving
from support.small_runs import Rows, replayed, small_config
from support.training_cases import check_processes_are_replays

from asyncpp_cli.runs.config_file import config_text, read_config
from asyncpp_cli.runs.settings import config_hash, get, with_settings
from optimizers.build import build_optimizer
from optimizers.custom import measured_values
from stages.config.run_config import CorrectionConfig, RunConfig, changed
from stages.config.segments import schedule_facts
from stages.model.custom import FactoryError, check_causal, make_stage
from stages.resolve.checks import ConfigError, check
from stages.shape.partition import cut_model
from stages.trainer import replay


def example(name: str) -> str:
    """A program of `support/users_code`, or the first one of a page of the documents."""
    if not name.endswith(".md"):
        return (ROOT / "tests" / "support" / "users_code" / f"{name}.py").read_text()
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), flags=re.DOTALL)
    return str(programs[0])


MODELS = """
from torch import nn, ones
from my_models import *

class Buffered(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scale = nn.Parameter(ones(config.width))
        self.register_buffer("table", ones(config.width) * 3)
    def forward(self, x):
        return x * self.scale * self.table

class Dropping(Buffered):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5)

class Doubled(Buffered):
    def forward(self, x):
        return super().forward(x).double()

class Transposed(Buffered):
    def forward(self, x):
        return super().forward(x).transpose(0, 1).contiguous().transpose(0, 1)

class Shorter(Buffered):
    def forward(self, x):
        return super().forward(x)[:, 1:]

def with_block(number, kind):
    def factory(config, context):
        embedding, blocks, head = gpt2_like(config, context)
        blocks[number] = kind(config)
        return embedding, blocks, head
    return factory

buffered, dropping = with_block(3, Buffered), with_block(3, Dropping)
doubled, transposed, shorter = with_block(2, Doubled), with_block(2, Transposed), with_block(2, Shorter)
wide = with_block(3, lambda config: nn.Linear(config.width, 2 * config.width))

class Masked(Buffered):
    def __init__(self, config):
        super().__init__(config)
        self.mask = ones(config.width) * 2
        self.scaled = nn.utils.weight_norm(nn.Linear(config.width, config.width))
    def forward(self, x):
        return self.scaled(super().forward(x) * self.mask)

class Frozen(Buffered):
    def __init__(self, config):
        super().__init__(config)
        self.scale.requires_grad_(False)

class Empty(nn.Module):
    def __init__(self, config):
        super().__init__()
    def forward(self, x):
        return x

masked, frozen = with_block(3, Masked), with_block(3, Frozen)

def generated(config, context):
    embedding, blocks, head = gpt2_like(config, context)
    return embedding, (block for block in blocks), head

def without_parameters(config, context):
    embedding, blocks, head = gpt2_like(config, context)
    return embedding, [Empty(config) for _ in blocks], head

def few(config, context):
    embedding, blocks, head = gpt2_like(config, context)
    return embedding, blocks[1:], head

def tied(config, context):
    embedding, blocks, head = gpt2_like(config, context)
    head[1].weight = embedding.tokens.weight
    return embedding, blocks, head

def list_of(config, context):
    return list(gpt2_like(config, context))

class Mixing(nn.Module):
    def __init__(self, width, left, right):
        super().__init__()
        self.padding, self.mix = (left, right), nn.Conv1d(width, width, 8)
    def forward(self, x):
        return x + self.mix(nn.functional.pad(x.transpose(1, 2), self.padding)).transpose(1, 2)

class Centered(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))

class Elsewhere(nn.Linear):
    def forward(self, x):
        return super().forward(x.cuda())

class Rows(nn.Linear):
    def __init__(self, config):
        super().__init__(config.width, config.width)
        self.register_parameter("c[1:2]", nn.Parameter(ones(config.width)))

def convolutions(left, right):
    def factory(config, context):
        embedding, blocks, head = gpt2_like(config, context)
        return embedding, [Mixing(config.width, left, right) for _ in blocks], head
    return factory

before, around = convolutions(7, 0), convolutions(6, 1)
centered = with_block(2, lambda config: Centered(config.width, config.width))
elsewhere, rows = with_block(2, lambda config: Elsewhere(config.width, config.width)), with_block(2, Rows)

def no_module(config, context):
    embedding, blocks, head = gpt2_like(config, context)
    return embedding, blocks, lambda x: x
"""

OPTIMIZERS = """
import numpy
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

class Each(RowNormalized):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, parameter.grad, self.state[parameter], group["lr"])

class Changing(Each):
    # What it keeps is of another form after three steps, and no gradient is left.
    def update(self, parameter, gradient, state, lr):
        state["count"] = count = state.get("count", 0) + (1 if "half" in state else 0.5)
        state.setdefault("anchor", None)
        state["spread"] = gradient.mean().expand(parameter.shape)
        if count < 1.5:
            state["first"] = gradient.clone()
        else:
            state.pop("first", None)
            state["half"] = 1
            state["anchor"] = parameter.clone() if state["anchor"] is None else state["anchor"] * 0.9
        parameter.add_(state.get("first", gradient) + state["spread"], alpha=-lr / (1 + count))
        if state["anchor"] is not None:
            parameter.lerp_(state["anchor"], 0.01)

    def step(self):
        super().step()
        self.zero_grad()

class Complex(Each):
    def update(self, parameter, gradient, state, lr):
        state["phase"] = gradient.to(torch.complex64)

class Numpy(Each):
    def update(self, parameter, gradient, state, lr):
        state["scale"] = numpy.float64(2)

class Keeping(Each):
    def update(self, parameter, gradient, state, lr):
        parameter.add_(gradient - state.get("last", 0), alpha=-lr)
        state["last"] = gradient
"""

SCHEDULES = """
import sys
from dataclasses import replace
from my_schedules import *
from schedules.library.zb_v import zb_v
from schedules.segment import unflushed

def eager(segment, *, update_interval: int = 2):
    return unflushed(
        segment, schedule="eager", update_interval=update_interval, updates_together=False, stashed=True,
        ahead=1, read=lambda microbatch, newest: newest,
        initial_versions=(segment.first_microbatch // update_interval,),
        final_versions=(segment.end_microbatch // update_interval,),
    )

def v_shaped(segment):
    return zb_v(segment)

def without_last_backward(segment):
    program = gpipe(segment)
    return replace(program, actions=tuple(
        tuple(action for action in actions if action.op is not Op.BACKWARD or action.microbatch % 2)
        for actions in program.actions
    ))

def shorter(segment):
    return gpipe(replace(segment, steps=1))

def forgetful(segment):
    program = delayed_gpipe(segment)
    return replace(program, final_versions=program.final_versions[-1:])

def newest_in_backward(segment):
    program = delayed_gpipe(segment)
    return replace(program, actions=tuple(
        tuple(
            action._replace(version=action.microbatch // segment.microbatches)
            if action.op is Op.BACKWARD else action
            for action in actions
        )
        for actions in program.actions
    ))

def no_program(segment):
    return [0]

def failing(segment):
    raise KeyError("lost")

def leaving(segment):
    sys.exit(3)

number = 3
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of the documents and others, which other processes can import as well."""
    for name, code in {
        "my_models": example("my_models"),
        "my_optimizers": example("my_optimizers"),
        "my_schedules": example("schedules.md"),
        "bad_models": MODELS,
        "bad_optimizers": OPTIMIZERS,
        "further": SCHEDULES,
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def with_model(factory: str = "my_models:gpt2_like", schedule: str = "2bw", **options: Any) -> RunConfig:
    config = small_config(schedule, steps=5, **options)
    return changed(config, {"model.factory": factory})


def with_optimizer(name: str = "my_optimizers:RowNormalized", **options: Any) -> RunConfig:
    config = small_config("2bw", steps=6, optimizer=name, **options)
    if name.startswith("my_"):
        config = changed(config, {"optimizer.options": {"beta": 0.8}})
    return config


def with_schedule(name: str, **options: Any) -> RunConfig:
    clip = "stage" if name == "further:eager" else "global"
    return small_config(name, **{"microbatches": 4, "clip": clip} | options)


def examples() -> Iterator[RunConfig]:
    yield with_model()
    yield with_optimizer()
    yield with_optimizer(stages=1, data=2)
    yield with_optimizer("bad_optimizers:Changing", coefficient=1.0)
    yield from map(with_schedule, ("my_schedules:gpipe", "my_schedules:delayed_gpipe", "further:eager"))


@pytest.mark.slow
def test_processes_compute_the_bits_of_replay() -> None:
    """Tensors that are not contiguous are sent, too."""
    configs = [*examples(), with_model("bad_models:transposed")]
    for config in configs:
        check(config)
    for rows in check_processes_are_replays(configs, size=2)[:3]:
        losses = [row["train_loss"] for row in rows if row["kind"] == "step"]
        assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize(("number", "step"), [*((number, 2) for number in range(7)), (3, 4)])
def test_they_go_on_to_the_same_bits(number: int, step: int, tmp_path: Path) -> None:
    config = saving([*examples()][number])
    config = changed(config, {"train.steps": 6})
    replay_twice(config, tmp_path / "c", step=step)


def test_names_and_first_weights_of_a_model_do_not_depend_on_the_cut() -> None:
    # Untrained: the first loss tells the initial weights, the names are those of what is saved.
    by_stages = {}
    for stages in (1, 2, 4):
        config = with_model(schedule="gpipe", stages=stages)
        config = changed(config, {"train.steps": 1})
        result = replay(config, recorder=Rows())
        by_stages[stages] = (sorted(result.weights), result.train_losses)
    assert by_stages[1] == by_stages[2] == by_stages[4]
    names = by_stages[1][0]
    assert {"embedding.positions.weight", "blocks.3.up.bias", "head.1.weight"} <= set(names)


@pytest.mark.parametrize("schedule", ["paci", "zero-bubble"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_model_goes_with_other_schedules_and_with_recomputation(schedule: str, recompute: str) -> None:
    check(config := with_model(schedule=schedule, recompute=recompute))
    losses = replay(config, recorder=Rows()).train_losses
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_buffers_and_other_tensors_of_a_model_have_the_values_that_the_function_computes() -> None:
    config = with_model("bad_models:masked")
    [_, last] = cut_model(config.model, stages=2, context=12)
    with torch.device("meta"):
        stage = make_stage(config.model, last, context=12)
    stage.prepare(device=torch.device("cpu"), dtype=torch.bfloat16)
    [(name, buffer)] = stage.named_buffers()
    assert name == "blocks.3.table"
    for tensor, value in ((buffer, 3.0), (stage.blocks["3"].mask, 2.0)):
        assert torch.equal(tensor, torch.full((16,), value, dtype=torch.bfloat16))
    assert replay(config, recorder=Rows()).train_losses


def test_recomputation_draws_again_what_the_forward_drew() -> None:
    ends = []
    for recompute in ("none", "full"):
        torch.manual_seed(1)
        ends.append(replayed(with_model("bad_models:dropping", recompute=recompute)).digest)
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("bad_models:few", "returns 3 blocks, and model.layers is 4"),
        ("bad_models:tied", "head.1.weight is another parameter, too"),
        ("bad_models:wide", r"block 3 returns \[3, 12, 32\], must be a tensor \(batch, context, 16\)"),
        ("bad_models:doubled", r"block 2, the last .* of torch.float64, must be .* torch.float32"),
        ("bad_models:shorter", r"block 2, the last of its stage, hands on \[3, 11, 16\]"),
        ("bad_models:generated", "the blocks are generator, must be a list"),
        ("bad_models:frozen", "blocks.3.scale is not trained .* accepted: a buffer"),
        ("bad_models:without_parameters", "a stage of block 1 has no parameters"),
        ("bad_models:list_of", r"must return \(embedding, blocks, head\), not list"),
        ("bad_models:no_module", "head is function, must be a torch.nn.Module"),
    ],
)
def test_what_a_factory_makes_is_checked(factory: str, says: str) -> None:
    with pytest.raises(FactoryError, match=says):
        replay(with_model(factory, "1f1b", stages=4), recorder=Rows())


SIZES = "{layers: 4, width: 16, heads: 2, kv_heads: 1, mlp_width: 32, vocab_size: 256, factory: %s}"


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("my_models:gpt2_like", None),
        ("bad_models:before", None),
        ("bad_models:dropping", None),
        (
            "bad_models:around",
            "the output at token .* depends on token .*, which comes later; accepted: a causal",
        ),
        ("bad_models:centered", "the outputs of one sequence depend on the tokens of another"),
        (
            "bad_models:rows",
            r"blocks.2.c\[1:2\] reads as rows of a matrix in checkpoints; accepted: names without",
        ),
    ],
)
def test_sweep_refuses_a_model_that_sees_the_future(factory: str, says: str | None, tmp_path: Path) -> None:
    """It trained without a word, to a loss that no causal model has."""
    template = tmp_path / "t.yaml"
    template.write_text(
        f"matrix: {{schedule: [1f1b, 2bw]}}\nmodel: {SIZES % factory}\n"
        "parallel.stages: 2\ndata.context: 24\ntrain.steps: 2\noptimizer: adamw\n"
    )
    said = asyncpp("sweep", template, "--list", "--allow-code", factory.partition(":")[0])
    assert said.code == (2 if says else 0)
    assert re.search(f"model.factory: {factory}.*{says}.*2 cells" if says else "", said.errors), said
    assert "cannot be computed" not in said.errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="it can be computed here")
def test_a_model_that_cannot_be_computed_here_is_remarked_on(tmp_path: Path) -> None:
    template = tmp_path / "t.yaml"
    template.write_text(
        f"model: {SIZES % 'bad_models:elsewhere'}\nschedule: 1f1b\noptimizer: adamw\ntrain.steps: 2\n"
    )
    said = asyncpp("sweep", template, "--list", "--allow-code", "bad_models")
    assert (said.code, said.errors.count("bad_models:elsewhere cannot be computed here (")) == (0, 1)


def test_a_large_model_is_looked_at_as_a_small_one() -> None:
    """Its weights would take 28 GB."""
    model = replace(with_model("bad_models:around").model, layers=32, width=4096, heads=32, mlp_width=14336)
    with pytest.raises(FactoryError, match="which comes later"):
        check_causal(model, context=4096)
    assert check_causal(replace(model, factory="bad_models:before"), context=4096) is None


WHOLE = "whole, since model.factory makes whole blocks, 4 in all and at least 1 each"
REFUSED: list[tuple[str, Any, str]] = [
    ("model.factory", "my_models.gpt2_like", "accepted: package.module:function"),
    ("model.factory", "mine.make('x'):y", "accepted: package.module:function"),
    ("model.factory", "no_such_package.module:make", "no module no_such_package.module"),
    ("model.factory", "my_models:gpt2_liek", "my_models has no 'gpt2_liek'; did you mean gpt2_like"),
    ("model.family", "qwen3", "does not go with model.factory; accepted with it: llama"),
    ("model.init", "weights", "not with model.factory"),
    ("train.recompute", "selective", "not known what is cheap; accepted with it: none, full"),
    ("parallel.cut", [1.5, 2.5], WHOLE),
    ("optimizer.name", "torch.optim:Muonn", "torch.optim has no 'Muonn'; did you mean Muon"),
    ("optimizer.name", "bad_optimizers:number", "is int, must be a function or a class"),
    ("optimizer.name", "bad_optimizers:no_optimizer", "returns list, must return a torch.optim.Optimizer"),
    ("optimizer.name", "bad_optimizers:half", "of 1 parameters, must be of the 5 given"),
    ("optimizer.name", "bad_optimizers:leaving", r"fails \(SystemExit: 0\)"),
    (
        "optimizer.name",
        "bad_optimizers:Failing",
        r"\(RuntimeError: no kernel for this\) \(.*py, line 19\)",
    ),
    ("optimizer.name", "bad_optimizers:Listing", "keeps history, a list, which cannot be saved"),
    ("optimizer.name", "bad_optimizers:Complex", "keeps phase, a tensor of torch.complex64, which cannot be"),
    ("optimizer.name", "bad_optimizers:Numpy", "keeps scale, a numpy.float64, which cannot be saved"),
    ("optimizer.name", "bad_optimizers:Keeping", r"keeps last, the gradient itself.*gradient.clone\(\)"),
    ("optimizer.name", "bad_optimizers:Shared", "keeps state that is of no parameter"),
    ("optimizer.name", "bad_optimizers:Counting", "steps differently after a checkpoint"),
    ("schedule.name", "nowhere.at_all:gpipe", "cannot be imported .* name its folder in PYTHONPATH"),
    ("schedule.name", "my schedules:gpipe", "accepted: package.module:function"),
    ("schedule.name", "further:number", "is not a function"),
    ("schedule.name", "further:no_program", "returns list, must return a schedules.Program"),
    ("schedule.name", "further:failing", "KeyError: 'lost'"),
    ("schedule.name", "further:leaving", "SystemExit: 3"),
    ("schedule.name", "further:newest_in_backward", "keeps older versions beside these"),
    ("schedule.name", "further:shorter", "the program's steps is 1, must be 3"),
    ("schedule.name", "further:forgetful", r"ends with versions \[3\], and the next begins with \[2, 3\]"),
    (
        "schedule.name",
        "further:without_last_backward",
        "have no backward; first micro-batch 0 of stage 0; 12",
    ),
]


@pytest.mark.parametrize(("key", "value", "says"), REFUSED)
def test_what_cannot_be_used_is_refused_by_key(key: str, value: Any, says: str) -> None:
    section, _, name = key.rpartition(".")
    config = (
        with_model() if section in ("model", "train", "parallel") else small_config("1f1b", microbatches=4)
    )
    config = changed(config, {f"{section}.{name}": value})
    with pytest.raises(ConfigError, match=says) as refused:
        check(config)
    assert refused.value.key == key
    # Each mistake of a program has a line.
    assert "\n" not in refused.value.message or "backward" in value


@pytest.mark.parametrize("name", ["my_optimizers:RowNormalized", "torch.optim:NAdam"])
def test_an_optimizers_state_is_planned_as_it_is_measured(name: str) -> None:
    config = with_optimizer(name, data=2)
    measured = replayed(config).memory["optimizer"]
    assert [stage.optimizer for stage in planned(config).stages] == measured


def test_an_optimizer_that_asks_for_values_is_planned_by_a_smaller_step() -> None:
    assert measured_values("bad_optimizers:Asking", "matrix", (1000, 300), {}) == 300_000


def test_an_optimizers_groups_have_roles_and_their_own_peaks() -> None:
    names = ("embedding.weight", "blocks.0.up.weight")
    parameters = {name: torch.nn.Parameter(torch.ones(4, 4)) for name in names}
    given: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.1, "options": {"beta": 0.7}}
    optimizer = build_optimizer(parameters, name="my_optimizers:RowNormalized", **given)
    groups = {group["role"]: group for group in optimizer.param_groups}
    assert [groups[role]["weight_decay"] for role in ("matrix", "embedding")] == [0.1, 0.0]
    assert {(group["peak_lr"], group["beta"]) for group in groups.values()} == {(0.5, 0.7)}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"optimizer.beta1": 0.9}, "optimizer.beta1"),
        ({"optimizer.options.gamma": 1}, "optimizer.name"),
        ({"optimizer.name": "adamw"}, "optimizer.options.beta"),
    ],
)
def test_options_go_to_their_optimizer(settings: dict[str, Any], key: str) -> None:
    config = with_settings(with_optimizer(), settings)
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert caught.value.key == key


def test_options_are_part_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(config_text(config := with_optimizer()))
    read = read_config(tmp_path / "config.yaml")
    assert get(read, "optimizer.options.beta") == 0.8
    assert config_hash(read) == config_hash(config)
    read = with_settings(read, {"optimizer.options.beta": 0.9})
    assert config_hash(read) != config_hash(config)
    assert get(config, "optimizer.options.beta") == 0.8


@pytest.mark.slow
def test_sweep_and_plan_take_an_optimizer_and_refuse_mistakes_in_one_line() -> None:
    own = ["matrix.optimizer=[my_optimizers:RowNormalized]", "matrix.optimizer.options.beta=[0.5,0.9]"]
    swept = asyncpp("sweep", "quickstart", "--list", *own, "matrix.error_feedback=[0]", "exclude=[]")
    assert swept.code == 0, swept.errors
    assert "beta=0.5" in swept.output
    assert "beta=0.9" in swept.output
    sweep = ("sweep", "quickstart", "--list", "matrix.optimizer=[adamw]")
    plan = ("plan", "nano", "--gpus", "2", "--device", "h100")
    assert asyncpp(*plan, "optimizer=my_optimizers:RowNormalized").code == 0
    for words, says in (
        (
            (*sweep, "optimizer=bad_optimizers:Listing"),
            "optimizer.name: bad_optimizers:Listing keeps history",
        ),
        ((*sweep, "optimizer.options=3"), "optimizer.options: takes one option by name"),
        ((*plan, "optimizer=bad_optimizers:Failing"), "nano: optimizer.name: bad_optimizers:Failing fails"),
    ):
        refused = asyncpp(*words)
        assert (refused.code, refused.errors.count("\n")) == (2, 1)
        assert says in refused.errors


@pytest.mark.parametrize(
    ("name", "like", "options"),
    [
        ("my_schedules:gpipe", "gpipe", {}),
        # The order differs; versions, and the order in which gradients are summed, are those of 2bw.
        ("my_schedules:delayed_gpipe", "2bw", {"coefficient": 1.0}),
        ("my_schedules:delayed_gpipe", "2bw", {"delay": 2}),
        ("further:eager", "pipedream", {"update_interval": 2}),
        ("further:v_shaped", "zb-v", {}),
    ],
)
def test_a_schedule_computes_what_ours_does(name: str, like: str, options: dict[str, Any]) -> None:
    config, ours = with_schedule(name, **options), small_config(like, microbatches=4, **options)
    check(config)
    assert schedule_facts(config) == schedule_facts(ours)
    assert replayed(config).digest == replayed(ours).digest


def test_a_schedules_facts_are_those_of_its_program() -> None:
    facts = schedule_facts(with_schedule("my_schedules:delayed_gpipe"))
    assert (facts.synchronous, facts.updates_together, facts.stages) == (False, True, 2)
    sync_start = CorrectionConfig(name="sync-start", sync_steps=2)
    for config, says in (
        (with_schedule("my_schedules:gpipe", coefficient=1.0), "error_feedback: corrects for delay"),
        (with_schedule("further:eager", clip="global"), "each stage updates on its own"),
        (with_schedule("my_schedules:gpipe", chunks=2), "does not take chunks"),
        # A synchronous start leaves one version, and has one stage per rank.
        (
            replace(with_schedule("my_schedules:delayed_gpipe"), correction=sync_start),
            r"begins at step 2 with versions \[1, 2\], but only the newest",
        ),
        (
            replace(with_schedule("further:v_shaped"), correction=sync_start),
            "sync-start needs one stage a rank, in order",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            check(config)


def test_sweep_names_every_mistake_of_a_schedule_in_a_line(tmp_path: Path) -> None:
    template = tmp_path / "t.yaml"
    template.write_text(
        'matrix: {schedule: "further:without_last_backward", optimizer: adamw}\n'
        "model: micro\nschedule.microbatches: 2\ntrain.steps: 3\nerror_feedback: false\n"
    )
    words = ("sweep", template, "--allow-code", "further,my_schedules", "--out", tmp_path / "e")
    refused = asyncpp(*words)
    assert refused.code == 2
    _, first, second = refused.errors.splitlines()
    assert "schedule.name: further:without_last_backward: " in first
    assert "further:without_last_backward: " in second
    good = template.read_text().replace("further:without_last_backward", "my_schedules:delayed_gpipe")
    template.write_text(good)
    assert asyncpp(*words).code == 0
