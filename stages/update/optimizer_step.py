"""The update of one stage: clip, step the optimizer, correct, write the oldest replica."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optimizers.build import build_optimizer
from optimizers.corrections.base import Correction, PlainUpdate, build_stage_correction
from optimizers.corrections.catalogue import CORRECTIONS, check_correction
from optimizers.corrections.dc_asgd import compensate
from optimizers.corrections.discrepancy import DiscrepancyCorrection
from optimizers.named import is_custom
from stages.config.run_config import RunConfig, chosen_correction, optimizer_options
from stages.shape.families import parameter_roles
from stages.shape.moe import mixture_of
from stages.shape.parametrization import growth_of
from stages.update.balance import LoadTally, moved
from stages.update.lr_schedule import learning_rate_factor
from stages.update.weight_average import AveragedWeights
from stages.weights.flat_buffers import GradientBuffer
from stages.weights.tied_head import TiedHead
from stages.weights.weight_versions import Replica, WeightVersions, writing_under_pending_backward

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does."""
STEPS_TO_FULL_STATE = 2
"""Steps after which no optimizer of the catalogue adds to its state: SOAP's first one only sets its bases."""


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """Result of one update."""

    lr: float
    grad_norm: float | None
    """Norm before clipping; None if it is not computed (`clip: none`)."""
    skipped: bool
    """Whether the gradient was not finite, so that the weights did not change."""


@dataclass(frozen=True, kw_only=True)
class UpdateState:
    """State of a stage's optimizer and correction."""

    optimizer: list[dict[str, Any]]
    """For each parameter that this data rank owns."""
    correction: Mapping[str, Any]
    closed: bool
    """Whether it is complete: a user's own optimizer may add to its state at any step."""


def squared_norm(gradient: GradientBuffer) -> Tensor:
    """Sum of squares of the part of a stage's gradient that this data rank owns, a float64 scalar.

    Computed per parameter and summed in float64, so that it hardly depends on how the model is cut.
    """
    if not gradient.counted_views:
        return torch.zeros((), dtype=torch.float64, device=gradient.flat.device)
    norms = torch.stack(torch._foreach_norm(gradient.counted_views))
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
            stage: its number.
            delays: of each stage, the most updates between the weights that a gradient is computed at and
                those it is applied to.
            mismatch: the most versions between a micro-batch's forward and its backward at the stage.
        """
        self._config = config
        self._weights = weights
        self.optimizer: Optimizer | None = None
        """None on a data rank that owns no parameters."""
        parameters = dict(zip(weights.master.names, weights.master.parameters, strict=True))
        roles = parameter_roles(config.model, {name: len(shape) for name, shape in weights.shapes.items()})
        self._new_optimizer = partial(
            build_optimizer,
            parameters,
            name=config.optimizer.name,
            lr=config.optimizer.lr,
            weight_decay=config.optimizer.weight_decay,
            options=optimizer_options(config.optimizer),
            roles={name: roles[weights.parameter_of[name]] for name in parameters},
            stage=stage,
            delays=delays,
            growth=growth_of(config.model),
        )
        if weights.master.parameters:
            self.optimizer = self._new_optimizer()
        self.taken = 0
        """Steps that the optimizer has taken: updates that were not skipped."""
        mixture = mixture_of(config.model)
        self._balance_rate = mixture.balance_rate if mixture and mixture.balance == "bias" else 0.0
        biases = weights.replicas[0].biases
        blocks = weights.replicas[0].module.expert_blocks
        self.tally = LoadTally(blocks, experts=config.model.experts, device=biases.device)
        """Loads of the segment's updates."""
        chosen = chosen_correction(config)
        compensation = CORRECTIONS[chosen[0]].compensation if chosen else ""
        self._strength = float(check_correction(*chosen)[compensation]) if chosen and compensation else 0.0
        self._delay, self._mismatch = delays[stage], mismatch
        correction = self._new_correction()
        self._discrepancy = correction if isinstance(correction, DiscrepancyCorrection) else None
        self.average = self._averaged(correction)
        """None without `train.ema_decay`."""
        self.correction = self.average or correction

    def _new_correction(self) -> Correction:
        chosen = chosen_correction(self._config)
        if chosen is None:
            return PlainUpdate()
        name, options = chosen
        return build_stage_correction(name, options=options, delay=self._delay, mismatch=self._mismatch)

    def _averaged(self, correction: Correction) -> AveragedWeights | None:
        decay = self._config.train.ema_decay
        return None if decay is None else AveragedWeights(correction, decay=decay)

    def rehearse(self) -> None:
        """Take a step with a temporary optimizer, norm and clipping included, and restore the weights.

        One-time work of a first step (workspaces, kernels, memory) may wait for an idle device.
        """
        if self.optimizer is None:
            return
        master = self._weights.master.parameters
        kept = [parameter.detach().to("cpu", copy=True) for parameter in master]
        with self._made_up_gradients(), torch.no_grad():
            gradient = self._weights.gradient_buffer
            self.clip(gradient, squared=squared_norm(gradient))
            self._new_optimizer().step()
        with torch.no_grad():
            for parameter, weights in zip(master, kept, strict=True):
                parameter.copy_(weights)

    def state_after(self, updates: int) -> UpdateState:
        """The state that a new optimizer and a new correction have after some updates; only keys, shapes,
        types, devices and flags mean something. The weights are lost: they are about to be read.
        """
        custom = is_custom(self._config.optimizer.name)
        if self.optimizer is None:
            return UpdateState(optimizer=[], correction={}, closed=not custom)
        weights = self._weights
        master = weights.master.parameters
        optimizer, correction = self._new_optimizer(), self._new_correction()
        correction = self._averaged(correction) or correction
        for _ in range(min(updates, STEPS_TO_FULL_STATE)):
            with self._made_up_gradients(), torch.no_grad():
                correction.update(
                    optimizer=optimizer, master=master, replica=weights.owned_members(weights.replicas[0])
                )
        return UpdateState(
            optimizer=[dict(optimizer.state.get(parameter, {})) for parameter in master],
            correction=correction.state_dict(),
            closed=not custom,
        )

    @contextmanager
    def _made_up_gradients(self) -> Iterator[None]:
        """Within this context parameters have gradients. Any of full rank that are the same in every run will
        do."""
        master, gradient = self._weights.master.parameters, self._weights.gradient_buffer
        with torch.no_grad():
            for parameter, view in zip(master, gradient.owned_views, strict=True):
                parameter.grad = view.copy_(parameter)
        yield
        for parameter in master:
            parameter.grad = None
        gradient.flat.zero_()

    def prepare(self, gradient: GradientBuffer) -> None:
        """Apply a correction of the gradient, if the run has one, after the reduction and before clipping."""
        if self._strength and gradient.owned_views:
            (version,) = set(gradient.versions)
            compensate(
                gradient.owned_views,
                current=self._weights.owned_members(self._weights.newest()),
                computed_at=self._weights.owned_members(self._weights.replica_of(version)),
                strength=self._strength,
            )

    def clip(self, gradient: GradientBuffer, *, squared: Tensor) -> None:
        """Scale the part of a gradient that this data rank owns to a norm of at most `train.clip_norm`.

        The device is not synchronized. A gradient that is not finite stays so.

        Args:
            gradient: of the stage.
            squared: square of the norm to clip by, a float64 scalar.
        """
        scale = self._config.train.clip_norm / (squared.sqrt() + CLIP_EPSILON)
        for run in gradient.owned_runs:
            run.mul_(scale.clamp(max=1.0))

    @contextmanager
    def at_backward(self, replica: Replica, *, mismatch: int) -> Iterator[None]:
        """Within this context, the replica holds the weights that the correction computes for a backward.

        Args:
            replica: that the backward runs on.
            mismatch: versions between the weights it holds and those that the forward read.
        """
        if mismatch == 0 or self._discrepancy is None:
            yield
            return
        kept = [parameter.detach().clone() for parameter in replica.parameters]
        with torch.no_grad(), writing_under_pending_backward(replica.parameters):
            self._discrepancy.backward_weights(self._weights.master.parameters, replica.members, mismatch)
        yield
        with torch.no_grad(), writing_under_pending_backward(replica.parameters):
            torch._foreach_copy_(list(replica.parameters), kept)

    def apply(
        self, gradient: GradientBuffer, *, version: int, step: int, clip_by: float | None, finite: bool
    ) -> UpdateResult:
        """Write `version` of the parameters that this data rank owns.

        Args:
            gradient: of the micro-batches since the last update, reduced and clipped; cleared afterwards.
            version: the version written.
            step: 0-based step whose learning rate applies.
            clip_by: squared norm that it was clipped by, of all stages or of this one; None: not clipped.
            finite: whether the step is taken; if not, weights and balance biases do not change.
        """
        factor = learning_rate_factor(self._config.optimizer, step=step, steps=self._config.train.steps)
        norm = None if clip_by is None else math.sqrt(clip_by)
        master = self._weights.master.parameters
        biases = self._weights.newest().biases.clone()  # each version has its own, also after resuming
        if finite and self._balance_rate:
            biases = moved(biases, gradient.loads, rate=self._balance_rate)
        self.tally.add(gradient.loads)
        with self._weights.overwriting_oldest(version=version, biases=biases) as replica:
            if self.optimizer is not None:
                for group in self.optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * factor
                if finite:
                    self.correction.update(optimizer=self.optimizer, master=master, replica=replica)
                    self.taken += 1
                else:
                    self.correction.skip(master=master, replica=replica)
        gradient.clear()
        return UpdateResult(lr=self._config.optimizer.lr * factor, grad_norm=norm, skipped=not finite)


@dataclass
class StageState:
    """Weights and update of a stage, on one rank."""

    weights: WeightVersions
    update: StageUpdate
    tied: TiedHead | None = None
    """The head's matrix, where this stage has the head and another one the embedding, whose matrix it is."""

    def take_gradient(self) -> GradientBuffer:
        """Hand the accumulated gradient to the update (`WeightVersions.take_gradient`); that of a tied head
        goes to the embedding's."""
        if self.tied is not None:
            self.tied.hand_over()
        return self.weights.take_gradient()
