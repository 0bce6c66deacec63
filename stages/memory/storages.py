"""Counts the storages of tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor


class SavedTensors:
    """What autograd saves, and what selective recomputation makes again."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.made_again: list[list[Tensor]] = []
        """Of each cheap part that ran again, as `stages.model.gradients.selective` reports it."""

    def keep(self, tensor: Tensor) -> Tensor:
        # With its graph, which holds this hook, it would be a circle that Python's collector does not see.
        self.kept.append(tensor.detach())
        return self.kept[-1]

    def make_again(self, tensors: list[Tensor]) -> None:
        self.made_again.append(tensors)


def same(tensor: Tensor) -> Tensor:
    """The tensor: for a hook that only looks."""
    return tensor


def pointers_of(tensors: Iterable[Tensor]) -> set[int]:
    """The storages of these tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def bytes_of(tensors: Iterable[Tensor], *, without: Collection[int] = ()) -> int:
    """Bytes of the storages of these tensors, each counted once."""
    storages = {
        storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    return sum(size for pointer, size in storages.items() if pointer not in without)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in an object's attributes, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            yield from tensors_in(part)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from tensors_in(vars(value))
