"""The stability limit of an optimizer's momentum. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from optimizers.options import Value
from optimizers.theory.filters import Filter, limit


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
        None for a momentum that is no point of `optimizers.theory.filters`.
    """
    weight = 1.0
    if name in ("adamw", "soap", "basis-rotation"):
        beta = float(settings["beta1"])
    elif name == "qhadamw":
        beta, weight = float(settings["beta1"]), float(settings["momentum_weight"])
    elif name in ("sgd", "muon", "normuon"):
        beta = float(settings["momentum"])
        weight = beta if settings["nesterov"] else 1.0
    elif name == "scion":
        beta = float(settings["momentum"])
    elif name == "nadamw":
        beta = float(settings["beta1"])
        # mu_t of torch.optim.NAdam
        weight = beta * (1 - 0.5 * 0.96 ** (step * float(settings["momentum_decay"])))
    else:
        return None
    return limit(Filter(beta=beta, weight=weight, coefficient=coefficient), delay=delay)
