"""The corrections for stale gradients by name, and which schedules can carry them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from optimizers.options import Option, Value, settled


class Needs(StrEnum):
    """What a correction needs of a schedule."""

    DELAY = "delay"
    STASH = "delay, stashed weights"
    MISMATCH = "delay, unstashed weights"


class Copies(NamedTuple):
    """How many copies of the weights an update holds for itself, beside what it keeps."""

    during_step: int = 0
    """Beside the temporaries of the optimizer's step."""
    outside: int = 0
    """Before or after it."""


@dataclass(frozen=True, kw_only=True)
class CorrectionMethod:
    """A correction, which works with any optimizer."""

    name: str
    summary: str
    reference: str
    needs: Needs
    values_per_parameter: int
    """Values kept for each parameter in addition to the optimizer's, where the correction is active."""
    options: Mapping[str, Option]
    set_by: str = ""
    """What a run sets to have it, if not `correction.name`."""
    factory: str = ""
    """`package.module:name` of a function that makes a stage's `Correction` from the settings and the stage's
    `delay` and `mismatch`; empty: the update is plain, and the gradient or the program is what changes."""
    active: Callable[[Mapping[str, Value], int], bool] = lambda settings, mismatch: True
    """Whether it changes the updates of a stage, from the settings and the stage's mismatch."""
    copies: Callable[[Mapping[str, Value], bool], Copies] = lambda settings, narrow: Copies()
    """Copies that an update takes where the correction is active, from the settings and whether replicas are
    narrower than the master copy."""
    evaluates_its_state: bool = False
    """Whether the weights to evaluate depend on the state that it keeps."""
    synchronous_start: str = ""
    """The option that counts synchronous steps at the start of the run; empty: there are none."""
    compensation: str = ""
    """The option with the strength of a compensation of the gradient; empty: there is none."""
    prediction: str = ""
    """The option that says what is read of the optimizer's state to predict weights; empty: nothing is."""
    needs_one_version: bool = False
    """Whether it needs one weight version for all micro-batches of an update."""
    reads_all_weights: bool = False
    """Whether every backward reads the master copy of all of a stage's weights, which data ranks shard."""
    idle_at_delay_one: str = ""
    """What it does, if that changes nothing where the delay is 1 at every stage."""

    def values_kept(self, options: Mapping[str, Value], *, mismatch: int) -> int:
        """Values kept for each parameter of a stage.

        Raises:
            ValueError: An unknown option, or a value that is not accepted.
        """
        active = self.active(check_correction(self.name, options), mismatch)
        return self.values_per_parameter if active else 0

    @property
    def state_bytes_per_parameter(self) -> float:
        """Bytes kept for each float32 parameter."""
        return 4.0 * self.values_per_parameter


_COEFFICIENT = Option(default=1.0, low=0.0, meaning="c; 0 is plain delay")


def _has_coefficient(settings: Mapping[str, Value], mismatch: int) -> bool:
    return settings["coefficient"] != 0


def _predicted(settings: Mapping[str, Value], narrow: bool) -> Copies:
    return Copies(1, 1) if settings["flavour"] == "last-update" else Copies(0, 2)


_CORRECTIONS = (
    CorrectionMethod(
        name="error-feedback",
        summary="pay back the last step's error: x' = x - u - c (u - u_previous), look-ahead form",
        reference="arXiv 2606.30634",
        needs=Needs.DELAY,
        values_per_parameter=0,
        options={"coefficient": _COEFFICIENT},
        set_by="error_feedback.coefficient",
        factory="optimizers.corrections.error_feedback:look_ahead",
        active=_has_coefficient,
        # Replicas as wide as the master hold the weights before the step.
        copies=lambda settings, narrow: Copies(narrow, narrow),
    ),
    CorrectionMethod(
        name="error-feedback-buffered",
        summary="the same, with the previous update kept (the reference)",
        reference="arXiv 2606.30634",
        needs=Needs.DELAY,
        values_per_parameter=1,
        options={
            "coefficient": _COEFFICIENT,
            "decay_at": Option(
                default="y", choices=("y", "x"), meaning="weights that weight decay applies to"
            ),
        },
        set_by="error_feedback.coefficient and error_feedback.form: buffered",
        factory="optimizers.corrections.error_feedback:buffered",
        active=_has_coefficient,
        copies=lambda settings, narrow: Copies(2, 3),
        evaluates_its_state=True,
    ),
    CorrectionMethod(
        name="weight-prediction",
        summary="compute with the weights expected when the gradient arrives",
        reference="arXiv 1809.02839, 1911.04610, 2312.00839",
        needs=Needs.DELAY,
        values_per_parameter=0,
        options={
            "flavour": Option(
                default="last-update",
                choices=("last-update", "momentum", "adam-moments"),
                meaning="what the next updates are expected to be: PipeOptim, SpecTrain or XPipe",
            ),
            "reach": Option(default=1.0, low=0.0, meaning="horizon as a share of the stage's delay"),
        },
        factory="optimizers.corrections.weight_prediction:of_stage",
        copies=_predicted,
        prediction="flavour",
    ),
    CorrectionMethod(
        name="lr-discount",
        summary="divide the learning rate by tau^(1 - min(k/K, 1)) (PipeDream-LR)",
        reference="arXiv 1910.05124",
        needs=Needs.DELAY,
        values_per_parameter=0,
        options={"anneal": Option(default=1000, low=0, meaning="updates over which the discount fades out")},
        factory="optimizers.corrections.lr_discount:of_stage",
        idle_at_delay_one="divides the learning rate by a power of the delay",
    ),
    CorrectionMethod(
        name="discrepancy",
        summary="run a backward near the weights of its forward, by average velocity (PipeMare)",
        reference="arXiv 1910.05124",
        needs=Needs.MISMATCH,
        values_per_parameter=1,
        options={
            "memory": Option(
                default=0.135,
                low=1e-6,
                high=1.0,
                meaning="share of the average left after `mismatch` updates",
            )
        },
        factory="optimizers.corrections.discrepancy:of_stage",
        active=lambda settings, mismatch: mismatch > 0,
        copies=lambda settings, narrow: Copies(1, 1),
        reads_all_weights=True,
    ),
    CorrectionMethod(
        name="delay-compensation",
        summary="add lambda g g (W - W_then) to the gradient (DC-ASGD)",
        reference="arXiv 1609.08326",
        needs=Needs.STASH,
        values_per_parameter=0,
        options={"strength": Option(default=0.04, low=0.0, meaning="lambda")},
        active=lambda settings, mismatch: settings["strength"] != 0,
        copies=lambda settings, narrow: Copies(0, 1),
        compensation="strength",
        needs_one_version=True,
    ),
    CorrectionMethod(
        name="sync-start",
        summary="the first steps synchronous, delayed from then on",
        reference="arXiv 2606.30634",
        needs=Needs.DELAY,
        values_per_parameter=0,
        options={"sync_steps": Option(default=100, low=0, meaning="synchronous steps")},
        synchronous_start="sync_steps",
    ),
)

CORRECTIONS: Mapping[str, CorrectionMethod] = {method.name: method for method in _CORRECTIONS}


def correction_named(name: str) -> CorrectionMethod:
    """The correction called `name`.

    Raises:
        ValueError: Unknown correction; the message lists those accepted.
    """
    if name not in CORRECTIONS:
        raise ValueError(f"unknown correction {name!r}; accepted: {', '.join(CORRECTIONS)}")
    return CORRECTIONS[name]


def check_correction(name: str, options: Mapping[str, object]) -> dict[str, Value]:
    """The settings of correction `name`: `options` over its defaults.

    Raises:
        ValueError: Unknown correction or option, or a value not accepted; the message says what would be.
    """
    return settled(f"correction {name!r}", correction_named(name).options, options)


def correction_copies(name: str, options: Mapping[str, object], *, narrow: bool, mismatch: int) -> Copies:
    """Copies of the weights that an update with correction `name` takes; none where it is not active.

    Args:
        name: A name of `CORRECTIONS`.
        options: Its options.
        narrow: Whether replicas are narrower than the master copy.
        mismatch: Of the stage.

    Raises:
        ValueError: An unknown option, or a value that is not accepted.
    """
    method, settings = correction_named(name), check_correction(name, options)
    return method.copies(settings, narrow) if method.active(settings, mismatch) else Copies()


def refusal(name: str, *, synchronous: bool, stashed: bool) -> str | None:
    """Why a schedule cannot use the correction `name`; None if it can.

    Args:
        name: A name of `CORRECTIONS`.
        synchronous: Whether the schedule's gradients are never delayed.
        stashed: Whether a micro-batch's backward uses the weights of its forward.

    Raises:
        ValueError: Unknown correction; the message lists those accepted.
    """
    needs = correction_named(name).needs
    if synchronous:
        return f"{name} corrects for delay, and a synchronous schedule has none"
    if needs is Needs.MISMATCH and stashed:
        return f"{name} mends a backward at newer weights than its forward's, and this schedule stashes those"
    if needs is Needs.STASH and not stashed:
        return (
            f"{name} wants the weights that a gradient was computed at, and this schedule keeps no older ones"
        )
    return None
