"""Weight prediction, discounts, discrepancy and delay compensation against their recurrences in plain
numbers."""

from __future__ import annotations

import math

import pytest
import torch
from support.optimizer_references import error_feedback

from optimizers.build import build_optimizer
from optimizers.corrections.base import Correction, PlainUpdate, build_stage_correction
from optimizers.corrections.catalogue import CORRECTIONS, refusal
from optimizers.corrections.dc_asgd import compensate
from optimizers.corrections.discrepancy import DiscrepancyCorrection
from optimizers.corrections.error_feedback import BufferedErrorFeedback, LookAheadErrorFeedback
from optimizers.corrections.lr_discount import LrDiscount, lr_discount
from optimizers.corrections.weight_prediction import WeightPrediction

STEPS = 30
NAME = "blocks.0.norm.weight"


def curve(w: float) -> float:
    """Gradient of a loss of one number."""
    return w - 0.5 * math.sin(2 * w) - 0.3


def trace(
    correction: Correction, name: str, delay: int, *, steps: int = STEPS, lr: float = 0.05, **options: float
) -> list[float]:
    """Every version that the pipeline computes with, when each gradient is `delay` versions old."""
    weight = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = build_optimizer({NAME: weight}, name=name, lr=lr, weight_decay=0.0, options=options)
    replica = weight.detach().clone()
    versions = [2.0]
    for _ in range(steps):
        at = versions[max(len(versions) - 1 - delay, 0)]
        weight.grad = torch.tensor([curve(at)], dtype=torch.float64)
        correction.update(optimizer=optimizer, master=[weight], replica=[replica])
        versions.append(float(replica))
    return versions


@pytest.mark.parametrize(("delay", "horizon"), [(1, 1.0), (3, 3.0), (3, 1.5)])
def test_prediction_by_momentum(delay: int, horizon: float) -> None:
    """SpecTrain: W - s lr v."""
    w, v, seen = 2.0, 0.0, [2.0]
    for _ in range(STEPS):
        v = 0.9 * v + 0.1 * curve(seen[max(len(seen) - 1 - delay, 0)])
        w -= 0.05 * v
        seen.append(w - horizon * 0.05 * v)
    assert trace(WeightPrediction(horizon, "momentum"), "sgd", delay) == pytest.approx(seen, abs=1e-12)


def test_prediction_by_the_last_update() -> None:
    """PipeOptim: W + s (W - W_before)."""
    w, v, seen = 2.0, 0.0, [2.0]
    for _ in range(STEPS):
        v = 0.9 * v + 0.1 * curve(seen[max(len(seen) - 3, 0)])
        before, w = w, w - 0.05 * v
        seen.append(w + 2 * (w - before))
    assert trace(WeightPrediction(2.0), "sgd", 2) == pytest.approx(seen, abs=1e-12)


def test_prediction_by_adams_moments() -> None:
    """XPipe: W - s lr m' / (sqrt(v') + eps)."""
    w, m, v, seen = 2.0, 0.0, 0.0, [2.0]
    for t in range(1, STEPS + 1):
        g = curve(seen[max(len(seen) - 3, 0)])
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        direction = (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.95**t)) + 1e-8)
        w -= 0.05 * direction
        seen.append(w - 2 * 0.05 * direction)
    assert trace(WeightPrediction(2.0, "adam-moments"), "adamw", 2) == pytest.approx(seen, abs=1e-12)


def test_a_horizon_of_zero_is_the_plain_update() -> None:
    for flavour, name in (("last-update", "muon"), ("momentum", "sgd"), ("adam-moments", "adamw")):
        assert trace(WeightPrediction(0.0, flavour), name, 1) == trace(PlainUpdate(), name, 1)


@pytest.mark.parametrize(
    ("flavour", "name", "options"), [("momentum", "sgd", {"momentum": 0.0}), ("adam-moments", "lion", {})]
)
def test_a_flavour_that_the_optimizer_cannot_serve(
    flavour: str, name: str, options: dict[str, float]
) -> None:
    with pytest.raises(ValueError, match=f"rule '{name}' keeps no"):
        trace(WeightPrediction(1.0, flavour), name, 1, **options)


def test_discount_follows_its_formula() -> None:
    assert [lr_discount(k, delay=4, anneal=2) for k in range(4)] == pytest.approx([1 / 4, 1 / 2, 1, 1])
    assert lr_discount(0, delay=0, anneal=10) == 1
    assert lr_discount(0, delay=3, anneal=0) == 1
    w, seen = 2.0, [2.0]
    for k in range(STEPS):
        g = curve(seen[max(len(seen) - 4, 0)])
        w -= 0.05 / 3 ** (1 - min(k / 20, 1)) * g
        seen.append(w)
    discounted = LrDiscount(PlainUpdate(), delay=3, anneal=20)
    assert trace(discounted, "sgd", 3, momentum=0.0) == pytest.approx(seen, abs=1e-12)


def test_discount_leaves_the_rate_as_it_was_and_wraps_any_correction() -> None:
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = build_optimizer({NAME: weight}, name="adamw", lr=0.3, weight_decay=0.0, options={})
    discounted = LrDiscount(error_feedback(1.0), delay=4, anneal=10)
    weight.grad = torch.ones(1, dtype=torch.float64)
    discounted.update(optimizer=optimizer, master=[weight], replica=[torch.zeros(1, dtype=torch.float64)])
    assert [group["lr"] for group in optimizer.param_groups] == [0.3]
    assert discounted.state_dict() == {"updates": 1, "inner": {"form": "look-ahead", "started": True}}


def test_discrepancy_estimates_the_weights_of_the_forward() -> None:
    mismatch, memory = 3, 0.2
    gamma = memory ** (1 / mismatch)
    correction = DiscrepancyCorrection(mismatch, memory)
    weight = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = build_optimizer({NAME: weight}, name="sgd", lr=0.05, weight_decay=0.0, options={})
    replica, out = weight.detach().clone(), torch.zeros(1, dtype=torch.float64)
    correction.backward_weights([weight], [out], mismatch)
    assert torch.equal(out, weight)
    velocity, previous = 0.0, 2.0
    for step in range(STEPS):
        if step == 9:
            correction.skip(master=[weight], replica=[replica])
        else:
            weight.grad = torch.tensor([curve(float(replica))], dtype=torch.float64)
            correction.update(optimizer=optimizer, master=[weight], replica=[replica])
        velocity = gamma * velocity + (1 - gamma) * (float(weight.detach()) - previous)
        previous = float(weight.detach())
        correction.backward_weights([weight], [out], mismatch)
        assert float(replica) == previous
        assert float(out) == pytest.approx(previous - mismatch * velocity, abs=1e-13)


def test_compensation_is_the_formula() -> None:
    gradient = [torch.tensor([0.5, -2.0], dtype=torch.float32)]
    now = [torch.tensor([1.0, 1.5], dtype=torch.bfloat16)]
    then = [torch.tensor([0.5, 2.0], dtype=torch.bfloat16)]
    compensate(gradient, current=now, computed_at=then, strength=0.1)
    expected = [0.5 + 0.1 * 0.25 * 0.5, -2.0 + 0.1 * 4.0 * -0.5]
    assert gradient[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_correction_that_does_not_fit_the_schedule_is_refused_with_the_reason() -> None:
    for name in CORRECTIONS:
        reason = refusal(name, synchronous=True, stashed=True)
        assert reason is not None
        assert "synchronous schedule has none" in reason
    unstashed = {name: refusal(name, synchronous=False, stashed=False) for name in CORRECTIONS}
    assert {name for name, reason in unstashed.items() if reason} == {"delay-compensation"}
    stashed = {name: refusal(name, synchronous=False, stashed=True) for name in CORRECTIONS}
    assert {name for name, reason in stashed.items() if reason} == {"discrepancy"}
    with pytest.raises(ValueError, match=r"accepted: error-feedback, .*delay-compensation"):
        refusal("feedback", synchronous=False, stashed=True)


@pytest.mark.parametrize(
    "build",
    [
        lambda: WeightPrediction(1.0, "last"),
        lambda: WeightPrediction(-1.0),
        lambda: DiscrepancyCorrection(0),
        lambda: DiscrepancyCorrection(2, memory=1.0),
    ],
)
def test_bad_arguments(build: object) -> None:
    with pytest.raises(ValueError, match=r"accepted|same weights"):
        build()  # type: ignore[operator]


def test_a_stage_gets_its_correction_by_name() -> None:
    """The same versions as from the classes, with horizons and discounts by the stage's delay."""
    for name, options, direct in (
        ("error-feedback", {"coefficient": 0.5}, LookAheadErrorFeedback(0.5)),
        ("error-feedback", {"coefficient": 0.0}, PlainUpdate()),
        ("error-feedback-buffered", {}, BufferedErrorFeedback(1.0)),
        ("weight-prediction", {"reach": 0.5}, WeightPrediction(1.5)),
        ("lr-discount", {"anneal": 20}, LrDiscount(PlainUpdate(), delay=3, anneal=20)),
        ("discrepancy", {}, DiscrepancyCorrection(3)),
        ("delay-compensation", {}, PlainUpdate()),
    ):
        named = build_stage_correction(name, options=options, delay=3, mismatch=3)
        assert type(named) is type(direct)
        assert trace(named, "adamw", 3) == trace(direct, "adamw", 3)
    assert isinstance(build_stage_correction("discrepancy", options={}, delay=0, mismatch=0), PlainUpdate)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("feedback", {}, "unknown correction 'feedback'; accepted: error-feedback"),
        ("lr-discount", {"delay": 3}, "correction 'lr-discount' has no option 'delay'; accepted: anneal"),
        ("weight-prediction", {"flavour": "adam"}, "accepted: last-update | momentum | adam-moments"),
        ("error-feedback", {"decay_at": "x"}, "has no option 'decay_at'; accepted: coefficient"),
        ("error-feedback-buffered", {"decay_at": "z"}, "accepted: y | x"),
        ("discrepancy", {"memory": 1.0}, "accepted: a number at least 1e-06 and below 1"),
    ],
)
def test_bad_options_of_a_correction_are_named(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=name) as error:
        build_stage_correction(name, options=options, delay=1, mismatch=1)  # type: ignore[arg-type]
    assert message in str(error.value)
