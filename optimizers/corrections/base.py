"""Corrections: what turns an optimizer step into the weights that the pipeline computes with next, and how
one is built by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from optimizers.corrections.catalogue import check_correction, correction_named
from optimizers.named import import_named
from optimizers.options import Value


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


def build_stage_correction(
    name: str, *, options: Mapping[str, Value], delay: int, mismatch: int
) -> Correction:
    """The correction `name` for a stage; the plain update where the catalogue says that it is not active.

    Args:
        name: One of `optimizers.CORRECTIONS`.
        options: What differs from the correction's defaults.
        delay: The most updates between the weights of the stage's gradients and those they are applied to.
        mismatch: The most versions between a micro-batch's forward and its backward at the stage.

    Raises:
        ValueError: Unknown correction or option, or a value that is not accepted.
    """
    method, settings = correction_named(name), check_correction(name, options)
    if not method.factory or not method.active(settings, mismatch):
        return PlainUpdate()
    made: Correction = import_named(method.factory)(settings, delay=delay, mismatch=mismatch)
    return made
