"""The stability limit of an optimizer's momentum. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from optimizers.catalogue import method_named
from optimizers.options import Value
from optimizers.theory.filters import Filter, limit
from optimizers.theory.stability import largest_stable_step, polynomials


def momentum_limit(
    name: str, settings: Mapping[str, Value], *, step: int, delay: int, coefficient: float
) -> float | None:
    """Largest stable learning rate times preconditioned curvature of the optimizer's momentum on matrices.

    The preconditioner is taken as constant, as in Cohen et al. (arXiv 2207.14484).

    Args:
        name: Of the optimizer.
        settings: Values of its options, defaults included.
        step: Updates done; NAdamW's weight of the momentum changes with them.
        delay: Updates between the weights of a gradient and those it is applied to.
        coefficient: c of error feedback.

    Returns:
        None for a momentum that is neither a point of `optimizers.theory.filters` nor Adan's.
    """
    averaging = method_named(name).momentum
    if averaging is None:
        return None
    momentum = averaging(settings, step)
    if momentum.change is not None:
        return _of_adan(beta1=momentum.beta, beta2=momentum.change, delay=delay, coefficient=coefficient)
    own = Filter(beta=momentum.beta, weight=momentum.weight, coefficient=coefficient)
    return limit(own, delay=delay)


def _of_adan(*, beta1: float, beta2: float, delay: int, coefficient: float) -> float:
    """Adan steps along M + beta2 V (`optimizers.rules.adan`), in powers of z

        (1 - beta1) z / (z - beta1) + beta2 (1 - beta2) (z - 1) / (z - beta2)

    of the gradient: plain momentum, and as a look-ahead the momentum of the gradient's change.
    """
    fixed, _ = polynomials(beta=beta1, weight=1.0, coefficient=coefficient, delay=delay)
    average = np.convolve([0.0, 1 - beta1], [-beta2, 1.0])
    change = beta2 * (1 - beta2) * np.convolve([-1.0, 1.0], [-beta1, 1.0])
    return largest_stable_step(
        np.convolve(fixed, [-beta2, 1.0]), np.convolve(average + change, [-coefficient, 1 + coefficient])
    )
