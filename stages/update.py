"""The update of one stage: clip, step the optimizer, correct, write the oldest replica."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimizers.build import build_optimizer
from optimizers.corrections import Correction, build_correction
from optimizers.stage_correction import build_stage_correction
from stages.config import OptimizerConfig, RunConfig, correction_options, optimizer_options
from stages.weights import GradientBuffer, WeightVersions

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does."""


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What one update was."""

    lr: float
    grad_norm: float | None
    """Norm before clipping; None where nobody asked for it (`clip: none`)."""
    skipped: bool
    """Whether the gradient held a value that is not finite, so that the weights stayed as they were."""


def learning_rate_factor(config: OptimizerConfig, *, step: int, steps: int) -> float:
    """Share of the peak learning rate at `step` (0-based) of `steps`: linear warm-up, then a cosine to
    `final_lr`."""
    warmup = max(1, round(config.warmup * steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def squared_norm(gradient: GradientBuffer) -> Tensor:
    """Sum of squares of a stage's gradient, a float64 scalar.

    Taken a parameter at a time and added in float64, so that it hardly depends on how the model is cut.
    """
    norms = torch.stack(torch._foreach_norm(gradient.views))
    return norms.double().square().sum()


class StageUpdate:
    """Turns a gathered gradient into the next weight version of one stage."""

    def __init__(
        self, config: RunConfig, weights: WeightVersions, *, stage: int, delays: Sequence[int], mismatch: int
    ) -> None:
        """Start with no steps taken.

        Args:
            config: the run's.
            weights: of the stage.
            stage: whose weights they are.
            delays: of each stage, most updates between the weights of its gradients and those they are
                applied to.
            mismatch: most versions between forward and backward of a micro-batch at the stage.
        """
        self._config = config
        self._weights = weights
        self.optimizer = build_optimizer(
            dict(zip(weights.names, weights.master.parameters, strict=True)),
            name=config.optimizer.name,
            lr=config.optimizer.lr,
            weight_decay=config.optimizer.weight_decay,
            options=optimizer_options(config.optimizer),
            stage=stage,
            delays=delays,
        )
        self.correction: Correction
        if config.correction.name == "none":
            self.correction = build_correction(
                coefficient=config.error_feedback.coefficient,
                form=config.error_feedback.form,
                decay_at=config.error_feedback.decay_at,
            )
        else:
            self.correction = build_stage_correction(
                config.correction.name,
                options=correction_options(config.correction),
                delay=delays[stage],
                mismatch=mismatch,
            )

    def apply(
        self, gradient: GradientBuffer, *, version: int, step: int, squared_norm: Tensor | None
    ) -> UpdateResult:
        """Write `version`.

        Args:
            gradient: gathered since the last update; cleared afterwards.
            version: the version written.
            step: 0-based step whose learning rate applies.
            squared_norm: what to clip by, a scalar: of all stages or of this one, as configured; None: no
                clipping.
        """
        factor = learning_rate_factor(self._config.optimizer, step=step, steps=self._config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        norm = None if squared_norm is None else math.sqrt(float(squared_norm))
        finite = bool(torch.isfinite(gradient.flat).all()) if norm is None else math.isfinite(norm)
        with self._weights.rewriting(version=version) as replica:
            if finite:
                if norm is not None:
                    scale = self._config.train.clip_norm / (norm + CLIP_EPSILON)
                    if scale < 1:
                        gradient.flat.mul_(scale)
                self.correction.update(
                    optimizer=self.optimizer, master=self._weights.master.parameters, replica=replica
                )
            else:
                self.correction.skip(master=self._weights.master.parameters, replica=replica)
        gradient.clear()
        return UpdateResult(lr=self._config.optimizer.lr * factor, grad_norm=norm, skipped=not finite)
