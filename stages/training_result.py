"""What training leaves in memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a run leaves in memory, for the stages that this process holds."""

    weights: dict[str, Tensor]
    """Evaluation weights and balance biases by name."""
    train_losses: list[float]
    """One per update; empty where the last stage of data rank 0 is in another process."""
    val_losses: list[float]
    """One per evaluation; likewise."""
    stopped_at: int | None
    """Step after which the run ended because a stop was requested; None: it is complete, or paused."""
