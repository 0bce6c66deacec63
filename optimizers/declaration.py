"""How an optimizer is declared. Imports no torch.

The catalogue, the checks of options, the keys of a run's configuration, the table in docs/optimizers.md and
the planned memory all follow from the declarations in `optimizers.catalogue`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from optimizers.options import Option, Value

Settings = Mapping[str, Value]

ROLES = ("matrix", "embedding", "head", "vector", "router")
"""Values of `optimizers.grouping.Role`."""


@dataclass(frozen=True, kw_only=True)
class Momentum:
    """How a step averages gradients: `weight` of (1 - beta) z / (z - beta), the rest the gradient itself."""

    beta: float
    weight: float = 1.0
    change: float | None = None
    """Decay rate of an average of the gradient's change, which the step adds as a look-ahead (Adan)."""


class Scale(NamedTuple):
    """The diagonal D of a step u = D m: lr / (sqrt(v / (1 - rate^t)) + eps), or lr where there is no v."""

    second_moment: str = ""
    """Key of v in a parameter's state; empty: D is lr."""
    rate: str = "beta2"
    """Option with the decay rate of v."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An update rule and the state that it keeps."""

    name: str
    factory: str
    """`package.module:name` of a function or class that makes a `torch.optim.Optimizer` from a list of
    parameter groups and the method's settings."""
    state: str | Callable[[Settings], str]
    """Values kept for a matrix of `rows` x `columns`, as in `2 rows columns + rows`; `smaller` is the smaller
    side. A vector has one column. Step counters, one number per tensor, are not counted."""
    matrix_iterations: int = 0
    """Iterations of an orthogonalization in a step, for the planned time."""
    momentum: str = ""
    """Key of the momentum in a parameter's state, for weight prediction; empty: none is kept as it is."""
    scale: Scale | None = None
    """What the momentum is scaled by, for diagnostics; None: not by such a diagonal."""
    auxiliary: bool = False
    """Whether the option `auxiliary_lr_ratio` applies to its learning rate."""
    adam_moments: bool = False
    """Whether the state has AdamW's moments, and the step is AdamW's, for weight prediction."""

    def state_formula(self, settings: Settings) -> str:
        """The formula of the state under `settings`."""
        return self.state if isinstance(self.state, str) else self.state(settings)

    def state_values(self, shape: tuple[int, ...], settings: Settings) -> int:
        """Values kept for a parameter of this shape."""
        return sum(_term(term, shape) for term in self.state_formula(settings).split(" + "))


@dataclass(frozen=True, kw_only=True)
class MeasuredRule(Rule):
    """The rule of a custom optimizer for parameters of one role."""

    state: str = ""
    role: str

    def state_values(self, shape: tuple[int, ...], settings: Settings) -> int:
        """Values kept for a parameter of this shape, measured. Imports torch and the user's module.

        Raises:
            ValueError: The optimizer cannot be built or fails.
        """
        from optimizers.custom import measured_values

        return measured_values(self.factory, self.role, shape, settings)


def _term(term: str, shape: tuple[int, ...]) -> int:
    rows, columns = shape[0], prod(shape[1:])
    sides = {"rows": rows, "columns": columns, "smaller": min(rows, columns)}
    value = 1
    for factor in term.split():
        side, _, power = factor.partition("^")
        value *= int(side) if side.isdigit() else sides[side] ** int(power or 1)
    return value


@dataclass(frozen=True, kw_only=True)
class Method:
    """One optimizer: which rule updates which parameters, with which options."""

    name: str
    summary: str
    reference: str
    main: Rule
    """Updates matrices in blocks, and the roles that `others` does not name."""
    others: Mapping[str, Rule] = field(default_factory=dict)
    """Rules by role."""
    options: Mapping[str, Option] = field(default_factory=dict)
    momentum: Callable[[Settings, int], Momentum] | None = None
    """Momentum of matrices, from the settings and the number of earlier updates, for the stability limit;
    None: not such an average."""
    step_copies: int = 2
    """Temporary copies of its parameters that a step makes, for the planned memory."""

    def rule(self, role: str) -> Rule:
        """The rule that updates parameters of a role."""
        return self.others.get(role, self.main)

    @property
    def rules(self) -> Mapping[str, str]:
        """Names of the rules by role."""
        return {role: self.rule(role).name for role in ROLES}

    def predicts(self, flavour: str, options: Settings) -> bool:
        """Whether each of its rules keeps the state that a flavour of weight prediction reads."""
        rules = [self.rule(role) for role in ROLES]
        if flavour == "adam-moments":
            return all(rule.adam_moments for rule in rules)
        if flavour == "momentum":
            return all(rule.momentum for rule in rules) and options.get("momentum") != 0
        return True

    @property
    def defaults(self) -> Settings:
        """The options' default values."""
        return {key: option.default for key, option in self.options.items()}

    @property
    def matrix_state(self) -> str:
        """Formula of the main rule's state for a matrix, with default options."""
        return self.main.state_formula(self.defaults)

    @property
    def state_bytes_per_parameter(self) -> float:
        """Bytes kept for each entry of a large square float32 matrix, with default options."""
        side = 2**20
        return 4 * (self.main.state_values((side, side), self.defaults) // side**2)


def custom_method(name: str) -> Method:
    """A custom optimizer, as far as it is known without importing it."""
    rules = {role: MeasuredRule(name=name, factory=name, role=role) for role in ROLES}
    return Method(
        name=name, summary="an optimizer of your own", reference="", main=rules["matrix"], others=rules
    )
