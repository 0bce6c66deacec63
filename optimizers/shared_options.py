"""Options that several optimizers have. Imports no torch."""

from __future__ import annotations

from optimizers.options import Option


def decay_rate(default: float, meaning: str) -> Option:
    """A share that is kept per step."""
    return Option(default=default, low=0.0, high=1.0, meaning=meaning)


def epsilon(default: float) -> Option:
    """A number that keeps a division finite."""
    return Option(default=default, low=0.0, meaning="added to the denominator")


def adam_options(beta1: float, beta2: float) -> dict[str, Option]:
    """Of optimizers with both moments of Adam."""
    return {
        "beta1": decay_rate(beta1, "decay of the first moment"),
        "beta2": decay_rate(beta2, "decay of the second moment"),
        "eps": epsilon(1e-8),
    }


AUXILIARY = {
    "beta1": decay_rate(0.9, "AdamW part (embedding, head, router, vectors): decay of the first moment"),
    "beta2": decay_rate(0.95, "AdamW part: decay of the second moment"),
    "eps": Option(default=1e-8, low=0.0, meaning="AdamW part: added to the denominator"),
    "auxiliary_lr_ratio": Option(
        default=1.0, low=0.0, meaning="AdamW part: its learning rate as a share of the optimizer's"
    ),
}
"""Of the AdamW that an optimizer of matrices leaves the other parameters to."""

REFRESH = {
    "refresh_interval": Option(default=10, low=1, meaning="steps between refreshes of the bases"),
}
"""Of optimizers with bases."""

MOMENTUM = {
    "momentum": decay_rate(0.95, "decay of the averaged gradient"),
    "nesterov": Option(default=True, meaning="step along the look-ahead (1 - momentum) G + momentum M"),
}
"""Of optimizers with one average of the gradient."""

RESTARTS = {"newton-schulz": 2, "polar-express": 1, "gram": 2}
"""Of each way to orthogonalize a wide matrix X, in bfloat16: iterations on X X^T before both are formed
anew. More leave the range that is documented."""


def is_wide(smaller: int, larger: int) -> bool:
    """Whether iterations on X X^T take fewer operations than on X."""
    return larger > 1.5 * smaller


def is_halved(side: int) -> bool:
    """Whether of a symmetric product of this side only a part is computed; smaller ones are too short for
    two kernels."""
    return side >= 1024


def orthogonal_flops(smaller: int, larger: int, iteration: str) -> int:
    """Operations of orthogonalizing a matrix with these sides on an accelerator."""
    count = 4 if iteration == "gram" else 5
    formed = -(-count // RESTARTS[iteration]) if is_wide(smaller, larger) else count
    others = count - formed
    # X X^T and a product with X where X is formed, A^2 in each iteration. In the others P A, its product with
    # P, and that of factors, which are symmetric, too.
    with_larger, of_smaller = 2 * smaller**2 * larger * formed, 2 * smaller**3
    symmetric = with_larger + of_smaller * formed
    full = of_smaller * 4 * others
    if iteration != "gram":
        symmetric, full = symmetric + full, 0
    half = smaller // 2
    share = smaller**2 - half * (smaller - half) if is_halved(smaller) else smaller**2
    return with_larger + full + symmetric * share // smaller**2


ORTHOGONAL = {
    "iteration": Option(
        default="newton-schulz",
        choices=("newton-schulz", "polar-express", "gram"),
        meaning="how matrices are orthogonalized",
    ),
    "precision": Option(
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        meaning="what the orthogonalization computes in; auto: float32 on a CPU, bfloat16 elsewhere",
    ),
}
"""Of optimizers that orthogonalize."""
