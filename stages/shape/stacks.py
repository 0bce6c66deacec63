"""Stacks of matrices: parameters of shape (experts, rows, columns). Imports no torch.

A module computes with a whole stack. Optimizers, data ranks, checkpoints and initial values handle its
matrices, its members, one by one: `blocks.3.experts.up.5` is the sixth matrix of `blocks.3.experts.up`. Every
other parameter is its own only member.
"""

from __future__ import annotations

Shape = tuple[int, ...]


def is_stack(shape: Shape) -> bool:
    """Whether a parameter of this shape is a stack."""
    return len(shape) == 3


def member_count(shape: Shape) -> int:
    """Number of members of a parameter of this shape."""
    return shape[0] if is_stack(shape) else 1


def member_shape(shape: Shape) -> Shape:
    """The shape of each of its members."""
    return shape[1:] if is_stack(shape) else shape


def member_names(name: str, shape: Shape) -> tuple[str, ...]:
    """The names of its members."""
    return tuple(f"{name}.{index}" for index in range(shape[0])) if is_stack(shape) else (name,)
