"""The stability limit of an optimizer's momentum. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from optimizers.options import Value
from optimizers.theory.stability import stability_limit


def momentum_limit(
    name: str, settings: Mapping[str, Value], *, delay: int, coefficient: float
) -> float | None:
    """Largest stable learning rate times preconditioned curvature of the optimizer's momentum on matrices.

    The preconditioner is taken as constant, as in Cohen et al. (arXiv 2207.14484).

    Args:
        name: Of the optimizer.
        settings: Values of its options, defaults included.
        delay: Updates between the weights of a gradient and those it is applied to.
        coefficient: c of error feedback.

    Returns:
        None for momentum of another form than `optimizers.theory.stability.FORMS`, such as NAdamW's, whose
        weight changes during a run.
    """
    if name in ("adamw", "soap", "basis-rotation"):
        form, beta = "ema", settings["beta1"]
    elif name in ("sgd", "muon", "normuon"):
        form, beta = "nesterov-ema" if settings["nesterov"] else "ema", settings["momentum"]
    elif name == "scion":
        form, beta = "ema", settings["momentum"]
    else:
        return None
    return stability_limit(form, beta=float(beta), delay=delay, coefficient=coefficient)
