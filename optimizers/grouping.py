"""Roles of parameters, and the groups that an optimizer updates by one rule. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from optimizers.catalogue import method_named


class Role(StrEnum):
    """Decides a parameter's update rule and weight decay."""

    MATRIX = "matrix"
    """A weight matrix inside a block (attention or MLP), or a stack of experts' matrices, one for each index
    of the first axis."""
    EMBEDDING = "embedding"
    """Rows are tokens; a step touches few of them."""
    HEAD = "head"
    """The output projection; rows are tokens."""
    VECTOR = "vector"
    """Norm gains and biases."""
    ROUTER = "router"
    """Chooses experts; rows are experts."""


DECAYED = frozenset({Role.MATRIX, Role.HEAD, Role.ROUTER})
"""Roles under weight decay. Not vectors, whose norm does not measure capacity, and not the embedding, most
rows of which have no gradient in a step and would only shrink (as in PACI's recipe, arXiv 2606.07881)."""


def role_of(name: str, dimensions: int) -> Role:
    """The role of a parameter in a model without a description, by its name and number of dimensions.

    Raises:
        ValueError: No rule is known for such a parameter.
    """
    if dimensions < 2:
        return Role.VECTOR
    if name.startswith("embedding."):
        return Role.EMBEDDING
    if name.startswith("head."):
        return Role.HEAD
    if name.startswith("blocks.") and dimensions <= 3:
        return Role.MATRIX
    raise ValueError(
        f"no optimizer rule for parameter {name!r} with {dimensions} dimensions: "
        "expected embedding.*, head.*, a matrix or a stack of matrices in blocks.*, or a vector"
    )


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that one rule updates with the same settings."""

    role: Role
    rule: str
    decayed: bool
    names: tuple[str, ...]


def assign(method: str, roles: Mapping[str, Role]) -> list[ParameterGroup]:
    """Group parameters for the optimizer `method`.

    Args:
        method: A name of `optimizers.NAMES`.
        roles: Of the parameters, by name.

    Returns:
        The groups that have members, main rule first, names in the order given.
    """
    rules = method_named(method).rules
    members: dict[Role, list[str]] = {role: [] for role in Role}
    for name, role in roles.items():
        members[role].append(name)
    return [
        ParameterGroup(role=role, rule=rules[role.value], decayed=role in DECAYED, names=tuple(names))
        for role, names in members.items()
        if names
    ]
