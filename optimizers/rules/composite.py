"""Several optimizers as one: one `step`, one list of groups, one state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimizers.rules.base import EagerOptimizer


class Composite(EagerOptimizer):
    """Steps its members in turn, each on its own parameters.

    Groups and state are shared with the members, so that `param_groups`, `state_dict` and `load_state_dict`
    work as in any optimizer, and a learning rate set in a group reaches the member that owns it.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self._members = tuple(members)
        super().__init__([group for member in members for group in member.param_groups], {})
        self._share()

    def _share(self) -> None:
        first = 0
        for member in self._members:
            count = len(member.param_groups)
            member.param_groups = self.param_groups[first : first + count]
            member.state = self.state
            first += count

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every member.

        Raises:
            ValueError: A closure was given; the pipeline computes gradients elsewhere.
        """
        if closure is not None:
            raise ValueError("this optimizer takes no closure")
        for member in self._members:
            member.step()
