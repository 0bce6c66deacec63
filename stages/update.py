"""The update of one stage: clip, step the optimizer, correct, write the oldest replica."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from optimizers.build import build_optimizer
from optimizers.compensation import compensate
from optimizers.correction_catalogue import check_correction
from optimizers.corrections import Correction, build_correction
from optimizers.discrepancy import DiscrepancyCorrection
from optimizers.stage_correction import build_stage_correction
from stages.config import OptimizerConfig, RunConfig, correction_options, optimizer_options
from stages.weights import GradientBuffer, Replica, WeightVersions, writing_under_pending_backward

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
    """Sum of squares of what this data rank owns of a stage's gradient, a float64 scalar.

    Taken a parameter at a time and added in float64, so that it hardly depends on how the model is cut.
    """
    if not gradient.owned_views:
        return torch.zeros((), dtype=torch.float64, device=gradient.flat.device)
    norms = torch.stack(torch._foreach_norm(gradient.owned_views))
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
        self.optimizer: Optimizer | None = None
        """None on a data rank that is left without parameters."""
        self._new_optimizer = partial(
            build_optimizer,
            dict(zip(weights.master.names, weights.master.parameters, strict=True)),
            name=config.optimizer.name,
            lr=config.optimizer.lr,
            weight_decay=config.optimizer.weight_decay,
            options=optimizer_options(config.optimizer),
            stage=stage,
            delays=delays,
        )
        if weights.master.parameters:
            self.optimizer = self._new_optimizer()
        settings = correction_options(config.correction)
        self._strength = 0.0
        if config.correction.name == "delay-compensation":
            self._strength = float(check_correction(config.correction.name, settings)["strength"])
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
                options=settings,
                delay=delays[stage],
                mismatch=mismatch,
            )

    def rehearse(self) -> None:
        """Take a step with an optimizer that is thrown away, and put the weights back.

        What a first step does once (a library's workspace, kernels, memory) may wait for the device to be
        idle.
        """
        if self.optimizer is None:
            return
        master, gradient = self._weights.master.parameters, self._weights.gathering
        kept = [parameter.detach().to("cpu", copy=True) for parameter in master]
        with torch.no_grad():
            for parameter, view in zip(master, gradient.owned_views, strict=True):
                # As good a gradient as any: of full rank, and the same in every run.
                parameter.grad = view.copy_(parameter)
            self._new_optimizer().step()
            for parameter, weights in zip(master, kept, strict=True):
                parameter.grad = None
                parameter.copy_(weights)
        gradient.flat.zero_()

    def prepare(self, gradient: GradientBuffer) -> None:
        """Change a gradient, added over the data ranks, before its norm is taken, where the correction does
        that."""
        if self._strength and gradient.owned_views:
            (version,) = set(gradient.versions)
            compensate(
                gradient.owned_views,
                current=self._weights.owned_of(self._weights.newest()),
                computed_at=self._weights.owned_of(self._weights.holding(version)),
                strength=self._strength,
            )

    def clip(self, gradient: GradientBuffer, *, squared: Tensor) -> None:
        """Scale what this data rank owns of a gradient, so that a norm of at most `train.clip_norm` is left.

        Where the gradient is, without asking for a value. A gradient that is not finite stays so.

        Args:
            gradient: of the stage.
            squared: of the norm to clip by, a float64 scalar.
        """
        scale = self._config.train.clip_norm / (squared.sqrt() + CLIP_EPSILON)
        gradient.owned.mul_(scale.clamp(max=1.0))

    @contextmanager
    def at_backward(self, replica: Replica, *, mismatch: int) -> Iterator[None]:
        """Let a backward in this context read the weights that the correction wants it to read.

        Args:
            replica: that the backward runs on.
            mismatch: versions between what it holds and what the forward read.
        """
        if mismatch == 0 or not isinstance(self.correction, DiscrepancyCorrection):
            yield
            return
        kept = [parameter.detach().clone() for parameter in replica.parameters]
        with torch.no_grad(), writing_under_pending_backward(replica.parameters):
            self.correction.backward_weights(self._weights.master.parameters, replica.parameters, mismatch)
        yield
        with torch.no_grad(), writing_under_pending_backward(replica.parameters):
            torch._foreach_copy_(list(replica.parameters), kept)

    def apply(
        self, gradient: GradientBuffer, *, version: int, step: int, clip_by: float | None, finite: bool
    ) -> UpdateResult:
        """Write `version` of the parameters that this data rank owns.

        Args:
            gradient: gathered since the last update, added over the data ranks and clipped; cleared
                afterwards.
            version: the version written.
            step: 0-based step whose learning rate applies.
            clip_by: squared norm it was clipped by: of all stages or of this one, as configured; None: it was
                not clipped.
            finite: whether the step is taken; if not, the weights stay as they were.
        """
        factor = learning_rate_factor(self._config.optimizer, step=step, steps=self._config.train.steps)
        norm = None if clip_by is None else math.sqrt(clip_by)
        master = self._weights.master.parameters
        with self._weights.rewriting(version=version) as replica:
            if self.optimizer is not None:
                for group in self.optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * factor
                if finite:
                    self.correction.update(optimizer=self.optimizer, master=master, replica=replica)
                else:
                    self.correction.skip(master=master, replica=replica)
        gradient.clear()
        return UpdateResult(lr=self._config.optimizer.lr * factor, grad_norm=norm, skipped=not finite)


@dataclass
class StageState:
    """A stage as its rank holds it."""

    weights: WeightVersions
    update: StageUpdate
