"""Options of optimizers and corrections: defaults, accepted values and messages; and those that several
optimizers have. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Value = float | bool | str


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of an optimizer or a correction."""

    default: Value
    meaning: str
    low: float | None = None
    """Smallest accepted number."""
    high: float | None = None
    """Accepted numbers are smaller."""
    choices: tuple[str, ...] = ()
    """Accepted values of an option that is text."""

    def accepts(self) -> str:
        """Description of the accepted values."""
        if self.choices:
            return " | ".join(self.choices)
        if isinstance(self.default, bool):
            return "true | false"
        whole = "a whole number" if isinstance(self.default, int) else "a number"
        bounds = [f"at least {self.low:g}"] if self.low is not None else []
        bounds += [f"below {self.high:g}"] if self.high is not None else []
        return " ".join([whole, " and ".join(bounds)]).strip()

    def holds(self, value: object) -> bool:
        """Whether `value` is accepted."""
        if self.choices:
            return value in self.choices
        if isinstance(self.default, bool):
            return isinstance(value, bool)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if isinstance(self.default, int) and value != int(value):
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value < self.high)


def settled(owner: str, accepted: Mapping[str, Option], options: Mapping[str, object]) -> dict[str, Value]:
    """`options` over the defaults of `accepted`.

    Args:
        owner: Optimizer or correction, for messages.
        accepted: Its options.
        options: The given values.

    Raises:
        ValueError: An unknown option, or a value that is not accepted; the message says what is.
    """
    settings: dict[str, Value] = {key: option.default for key, option in accepted.items()}
    for key, value in options.items():
        if key not in accepted:
            raise ValueError(f"{owner} has no option {key!r}; accepted: {', '.join(accepted) or 'none'}")
        if not accepted[key].holds(value):
            raise ValueError(f"{owner}: {key} is {value!r}, accepted: {accepted[key].accepts()}")
        assert isinstance(value, float | int | str)
        settings[key] = value
    return settings


def decay_rate(default: float, meaning: str) -> Option:
    """A share that is kept per step."""
    return Option(default=default, low=0.0, high=1.0, meaning=meaning)


def epsilon(default: float) -> Option:
    """A number that keeps a division finite."""
    return Option(default=default, low=0.0, meaning="added to the denominator")


def adam_options(beta1: float, beta2: float) -> dict[str, Option]:
    """The options of optimizers with both moments of Adam."""
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
"""Options of the AdamW that an optimizer of matrices leaves the other parameters to."""

REFRESH = {
    "refresh_interval": Option(default=10, low=1, meaning="steps between refreshes of the bases"),
}
"""Options of optimizers with bases."""

MOMENTUM = {
    "momentum": decay_rate(0.95, "decay of the averaged gradient"),
    "nesterov": Option(default=True, meaning="step along the look-ahead (1 - momentum) G + momentum M"),
}
"""Options of optimizers with one average of the gradient."""

RESTARTS = {"newton-schulz": 2, "polar-express": 1, "gram": 2}
"""For each way to orthogonalize a wide matrix X, in bfloat16, the iterations on X X^T before both are formed
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
"""Options of optimizers that orthogonalize."""
