"""Names, settings and groups: what a user reads, what the documents say, and what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from support.files import ROOT
from support.optimizer_references import SHAPES

import optimizers
from optimizers.build import build_optimizer
from optimizers.catalogue import METHODS
from optimizers.custom import OptimizerError, check_custom
from optimizers.grouping import Role, assign, role_of
from stages.config.run_config import OptimizerConfig


def test_importing_the_package_imports_no_torch() -> None:
    code = "import optimizers, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_names_list_what_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"unknown optimizer 'muonn'.*muon.*soap"):
        optimizers.check_options("muonn", {})
    with pytest.raises(ValueError, match=r"'lion' has no option 'momentum'; accepted: beta1, beta2"):
        optimizers.check_options("lion", {"momentum": 0.9})


@pytest.mark.parametrize(
    ("name", "options", "accepted"),
    [
        ("adamw", {"beta1": 1.0}, "a number at least 0 and below 1"),
        ("adamw", {"beta1": -0.1}, "a number at least 0 and below 1"),
        ("adamw", {"beta1": "0.9"}, "a number"),
        ("adamw", {"beta1": True}, "a number"),
        ("muon", {"scale": "rms"}, "match-rms | original"),
        ("muon", {"nesterov": 1}, "true | false"),
        ("soap", {"refresh_interval": 2.5}, "a whole number at least 1"),
        ("soap", {"refresh_interval": 0}, "a whole number at least 1"),
    ],
)
def test_bad_values_say_what_is_accepted(name: str, options: dict[str, object], accepted: str) -> None:
    with pytest.raises(ValueError, match="accepted: ") as error:
        optimizers.check_options(name, options)
    assert accepted in str(error.value)


def test_options_stand_over_the_defaults() -> None:
    settings = optimizers.check_options("muon", {"momentum": 0.9})
    assert settings["momentum"] == 0.9
    assert settings["beta2"] == 0.95


def test_every_option_can_be_configured() -> None:
    configured = {entry.name for entry in fields(OptimizerConfig)}
    assert {option for method in METHODS.values() for option in method.options} <= configured


def test_defaults_are_accepted_by_their_own_check() -> None:
    for method in METHODS.values():
        for key, option in method.options.items():
            assert option.holds(option.default), (method.name, key)


def test_roles() -> None:
    assert role_of("blocks.3.mlp.up.weight", 2) is Role.MATRIX
    assert role_of("blocks.3.mlp_norm.weight", 1) is Role.VECTOR
    assert role_of("embedding.weight", 2) is Role.EMBEDDING
    assert role_of("head.weight", 2) is Role.HEAD
    assert role_of("blocks.3.experts.up", 3) is Role.MATRIX
    for name, dimensions in (("router.weight", 2), ("blocks.0.experts.weight", 4)):
        with pytest.raises(ValueError, match=name):
            role_of(name, dimensions)


def test_matrices_in_blocks_go_to_the_main_rule_and_the_rest_to_adamw() -> None:
    groups = assign("muon", {name: role_of(name, len(shape)) for name, shape in SHAPES.items()})
    by_rule = {name: group.rule for group in groups for name in group.names}
    assert by_rule.keys() == SHAPES.keys()
    for name, rule in by_rule.items():
        assert rule == ("muon" if name.startswith("blocks") and "norm" not in name else "adamw")
    decayed = {name for group in groups if group.decayed for name in group.names}
    assert decayed == {name for name, shape in SHAPES.items() if len(shape) == 2} - {"embedding.weight"}


def test_given_roles_go_before_names_and_dimensions() -> None:
    weights = {f"blocks.0.{name}.weight": torch.nn.Parameter(torch.ones(2, 2)) for name in ("router", "up")}
    roles = dict(zip(weights, (Role.VECTOR, Role.MATRIX), strict=True))
    optimizer = build_optimizer(weights, name="muon", lr=1e-3, weight_decay=0.1, options={}, roles=roles)
    rules = {name: group["rule"] for group in optimizer.param_groups for name in group["param_names"]}
    assert rules == dict(zip(weights, ("adamw", "muon"), strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_the_declared_momentum_is_in_the_state(name: str) -> None:
    weights = {key: torch.nn.Parameter(torch.ones(shape)) for key, shape in SHAPES.items()}
    optimizer = build_optimizer(weights, name=name, lr=1e-3, weight_decay=0.0, options={})
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    for group in optimizer.param_groups:
        declared = METHODS[name].rule(group["role"])
        for state in (optimizer.state[parameter] for parameter in group["params"]):
            assert not declared.momentum or state[declared.momentum].ndim > 0
            assert not declared.adam_moments or state.keys() >= {"exp_avg", "exp_avg_sq", "step"}
        assert bool(declared.momentum) == (declared.name not in ("soap", "basis-rotation"))


def test_no_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        build_optimizer({}, name="muon", lr=1e-3, weight_decay=0.1, options={})


TEXT = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, its head first."""
    section = TEXT.partition(f"## {heading}\n")[2]
    rows = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    assert rows is not None
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[0].splitlines()]


def test_which_parameters_go_to_which_rule() -> None:
    head, _, *rows = table("Which parameter goes to which rule")
    columns = {name: column for column, cell in enumerate(head) for name in re.findall(r"`([\w-]+)`", cell)}
    rest = head.index("the others")
    words = {"AdamW": "adamw", "spectral steps": "scion-spectral", "sign steps": "scion-sign"}
    for name, method in optimizers.METHODS.items():
        documented = [row[columns.get(name, rest)] for row in rows]
        assert [words.get(rule, name) for rule in documented] == [
            method.rules[role] for role in ("matrix", "embedding", "head", "router", "vector")
        ]


def test_every_optimizer_and_correction_has_its_source() -> None:
    entries = [*optimizers.METHODS.values(), *optimizers.CORRECTIONS.values()]
    assert [e.name for e in entries if not re.search(r"\d{4}\.\d{5}|(19|20)\d\d", e.reference)] == []


def test_the_page_says_which_of_torchs_optimizers_are_taken() -> None:
    rows = re.search(r"\| `torch.optim:` \|.*?\n\n", TEXT, re.DOTALL)[0].strip().splitlines()[2:]
    said = {name: "taken" in row for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    taken = {}
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer":
            try:
                check_custom(f"torch.optim:{name}", ())
            except OptimizerError:
                taken[name] = False
            else:
                taken[name] = True
    # Another version of torch may have more of them.
    assert {name: taken[name] for name in said} == said
