"""Corrections: what turns an optimizer step into the weights that the pipeline computes with next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer


class Correction(Protocol):
    """Takes optimizer steps on the master parameters and writes the weights of the next version.

    `master` are the optimizer's parameters, with their gradients set. `replica` are tensors of the same
    shapes, possibly of a narrower type; their previous contents are not read.
    """

    def update(self, *, optimizer: Optimizer, master: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
        """Take one step and write the weights of the next version into `replica`."""

    def skip(self, *, master: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
        """Write the next version after an update of zero, because the gradient was not finite."""

    def evaluation_weights(self, master: Sequence[Tensor]) -> Sequence[Tensor]:
        """The weights to evaluate and save; read only."""

    def state_dict(self) -> dict[str, Any]:
        """State in addition to the master parameters and the optimizer's."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: The state is of another correction.
        """


class PlainUpdate:
    """The optimizer's step as it is."""

    @torch.no_grad()
    def update(self, *, optimizer: Optimizer, master: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
        optimizer.step()
        torch._foreach_copy_(list(replica), list(master))

    @torch.no_grad()
    def skip(self, *, master: Sequence[Tensor], replica: Sequence[Tensor]) -> None:
        torch._foreach_copy_(list(replica), list(master))

    def evaluation_weights(self, master: Sequence[Tensor]) -> Sequence[Tensor]:
        return master

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_form(state, "plain")


def check_form(state: Mapping[str, Any], form: str) -> None:
    """Refuse the state of another correction.

    Raises:
        ValueError: `state` is not of `form`.
    """
    saved = state.get("form", "plain")
    if saved != form:
        raise ValueError(f"the saved correction is of the form {saved!r}, this run's is {form!r}")
