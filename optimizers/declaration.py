"""How an optimizer is declared. Imports no torch.

The catalogue, the checks of options, the keys of a run's configuration, the table in docs/optimizers.md and
the planned memory all follow from the declarations in `optimizers.catalogue`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from optimizers.options import Option, Value

Settings = Mapping[str, Value]

ROLES = ("matrix", "embedding", "head", "vector", "router")
"""Values of `optimizers.grouping.Role`."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An update rule and the state that it keeps."""

    name: str
    factory: str
    """`package.module:name` of a function or class that makes a `torch.optim.Optimizer` from a list of
    parameter groups and the method's settings."""
    state: str | Callable[[Settings], str]
    """Values kept for a matrix of `rows` x `columns`, as in `2 rows columns + rows`; `smaller` and
    `larger` are its sides by size. A vector has one column. Step counters, one number per tensor, are not
    counted."""
    step: str | Callable[[Settings], str] = "0"
    """Values that a step takes for itself, in the form of `state`, per parameter. A group's parameters are
    updated at once, one group after another."""
    batch: str = "0"
    """Values that a step takes for each matrix of one batch (`batch_size`), in the form of `state`, on a GPU;
    without what its libraries take for decompositions."""
    flops: Callable[[Settings, int, int], int] | None = None
    """Operations of a step's matrix products, of the smaller and the larger side of a matrix."""
    momentum: str = ""
    """Key of the momentum in a parameter's state, for weight prediction; empty: none is kept as it is."""
    auxiliary: bool = False
    """Whether the option `auxiliary_lr_ratio` applies to its learning rate."""
    elementwise: bool = False
    """Whether each number of a matrix is updated as if it were alone, so that some of its rows can be."""
    adam_moments: bool = False
    """Whether the state has AdamW's moments, and the step is AdamW's, for weight prediction."""
    growth: float | Callable[[Settings], float | None] | None = None
    """Power of the width with which the spectral norm of a step grows, on a matrix both of whose sides grow
    with the width: 1 where each entry moves by about lr, 0 where the step is lr times an orthogonal matrix.
    None: not known."""

    def growth_power(self, settings: Settings) -> float | None:
        """`growth` under `settings`."""
        return self.growth(settings) if callable(self.growth) else self.growth

    def state_formula(self, settings: Settings) -> str:
        """The formula of the state under `settings`."""
        return self.state if isinstance(self.state, str) else self.state(settings)

    def state_values(self, shape: tuple[int, ...], settings: Settings) -> int:
        """Values kept for a parameter of this shape."""
        return _values(self.state_formula(settings), shape)

    def step_values(self, shapes: Iterable[tuple[int, ...]], settings: Settings) -> int:
        """Values that a step takes for itself on a group of parameters of these shapes."""
        formula = self.step if isinstance(self.step, str) else self.step(settings)
        alike = Counter(shapes)
        batches = (min(n, batch_size(shape)) * _values(self.batch, shape) for shape, n in alike.items())
        return sum(n * _values(formula, shape) for shape, n in alike.items()) + max(batches, default=0)


BATCH_ENTRIES = 2**26
"""The most entries in a batch of matrices, so that temporary copies stay small."""


def batch_size(shape: Sequence[int]) -> int:
    """How many matrices of this shape are updated as one batch, where they are batched.

    Not matrices with a side that is not a multiple of 8: the next matrix in the batch would not be aligned to
    the processor's vectors, and CPU libraries then round differently, so that results would depend on the
    batch.
    """
    return max(1, BATCH_ENTRIES // prod(shape)) if all(side % 8 == 0 for side in shape) else 1


@dataclass(frozen=True, kw_only=True)
class MeasuredRule(Rule):
    """The rule of a custom optimizer for parameters of one role."""

    state: str = ""
    step: str = "2 rows columns"
    role: str

    def state_values(self, shape: tuple[int, ...], settings: Settings) -> int:
        """Values kept for a parameter of this shape, measured. Imports torch and the user's module.

        Raises:
            ValueError: The optimizer cannot be built or fails.
        """
        from optimizers.custom import measured_values

        return measured_values(self.factory, self.role, shape, settings)


def _values(formula: str, shape: tuple[int, ...]) -> int:
    return sum(_term(term, shape) for term in formula.split(" + "))


def _term(term: str, shape: tuple[int, ...]) -> int:
    rows, columns = shape[0], prod(shape[1:])
    sides = {"rows": rows, "columns": columns, "smaller": min(rows, columns), "larger": max(rows, columns)}
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
