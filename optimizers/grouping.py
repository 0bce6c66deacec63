"""Which parameter goes to which rule: the one place that decides it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from optimizers.catalogue import METHODS


class Role(StrEnum):
    """What a parameter is to an optimizer."""

    MATRIX = "matrix"
    """A weight matrix inside a block (attention or MLP)."""
    EMBEDDING = "embedding"
    """Rows are tokens; a step touches few of them."""
    HEAD = "head"
    """The output projection; rows are tokens."""
    VECTOR = "vector"
    """Norm gains and biases."""


DECAYED = frozenset({Role.MATRIX, Role.HEAD})
"""Roles under weight decay. Not vectors, whose size is a meaning and not a capacity, and not the embedding,
most rows of which have no gradient in a step and would only shrink (as in PACI's recipe, arXiv
2606.07881)."""


def role_of(name: str, dimensions: int) -> Role:
    """The role of the parameter called `name`, such as `blocks.3.mlp.up.weight`.

    Raises:
        ValueError: No rule is known for such a parameter.
    """
    if dimensions < 2:
        return Role.VECTOR
    if name.startswith("embedding."):
        return Role.EMBEDDING
    if name.startswith("head."):
        return Role.HEAD
    if name.startswith("blocks.") and dimensions == 2:
        return Role.MATRIX
    raise ValueError(
        f"no optimizer rule for parameter {name!r} with {dimensions} dimensions: "
        "expected embedding.*, head.*, a matrix in blocks.*, or a vector"
    )


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that one rule updates with the same settings."""

    role: Role
    rule: str
    decayed: bool
    names: tuple[str, ...]


def assign(method: str, dimensions: Iterable[tuple[str, int]]) -> list[ParameterGroup]:
    """Group parameters for the optimizer `method`.

    Args:
        method: A name of `optimizers.NAMES`.
        dimensions: (name, number of dimensions) of each parameter.

    Returns:
        The groups that have members, main rule first, names in the order given.
    """
    rules = METHODS[method].rules
    members: dict[Role, list[str]] = {role: [] for role in Role}
    for name, count in dimensions:
        members[role_of(name, count)].append(name)
    return [
        ParameterGroup(role=role, rule=rules[role.value], decayed=role in DECAYED, names=tuple(names))
        for role, names in members.items()
        if names
    ]


def describe(groups: Iterable[ParameterGroup]) -> list[str]:
    """One line a group, for people: the rule, whether it decays, how many parameter tensors, and the first
    names."""
    lines = []
    for group in groups:
        first = ", ".join(group.names[:3]) + (", ..." if len(group.names) > 3 else "")
        decayed = "decayed" if group.decayed else "not decayed"
        lines.append(f"{group.rule}: {len(group.names)} x {group.role.value} ({decayed}): {first}")
    return lines
