"""Number formats of a run: of its master copy and gradients, and of what is computed with."""

from __future__ import annotations

from typing import NamedTuple

import torch

from stages.config.run_config import RunConfig


class Types(NamedTuple):
    """Number formats of a run."""

    master: torch.dtype
    """Type of the master copy and the gradients."""
    replica: torch.dtype
    """Type of the working weights, and of messages between stages."""


def dtypes(config: RunConfig) -> Types:
    """The number formats of `train.precision`."""
    replica = getattr(torch, config.train.precision)
    return Types(master=torch.float32 if replica is torch.bfloat16 else replica, replica=replica)
