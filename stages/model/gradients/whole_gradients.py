"""Which gradients of a stage are complete: their sum over the data ranks begins within the last backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor


class WholeGradients:
    """Reports during a stage's last backward which of its gradients are complete.

    Args:
        parameters: of the stage, in the model's order.
        advance: called with the number of parameters, counted from the last, whose gradients are complete.
    """

    def __init__(self, parameters: Sequence[Tensor], *, advance: Callable[[int], None]) -> None:
        self._parameters = parameters
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._advance = advance
        self._missing = set(range(len(parameters)))
        self._first_whole = len(parameters)

    def leave(self, parameters: Collection[Tensor]) -> None:
        """All gradients are complete except those of `parameters`; those of other stages do not count."""
        numbers = (self._numbers.get(id(parameter)) for parameter in parameters)
        self._missing = {number for number in numbers if number is not None}

    def note(self, parameter: Tensor) -> None:
        """The gradient of `parameter` is complete; nothing happens if it is of another stage."""
        if id(parameter) not in self._numbers:
            return
        self._missing.discard(self._numbers[id(parameter)])
        before = self._first_whole
        while self._first_whole and self._first_whole - 1 not in self._missing:
            self._first_whole -= 1
        if self._first_whole < before:
            self._advance(len(self._parameters) - self._first_whole)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note each gradient that a backward in this context completes."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(self.note)  # type: ignore[no-untyped-call]
            for parameter in self._parameters
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
