"""The optimizers by name: what each is, its settings with their defaults, what it keeps, and where it is
from.

Imports no torch, so that the command line can list and check optimizers quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from optimizers.options import Option, Value, settled


def _everywhere(rule: str) -> Mapping[str, str]:
    return {"matrix": rule, "embedding": rule, "head": rule, "vector": rule}


def _on_matrices(rule: str) -> Mapping[str, str]:
    return {"matrix": rule, "embedding": "adamw", "head": "adamw", "vector": "adamw"}


@dataclass(frozen=True, kw_only=True)
class Method:
    """One optimizer."""

    name: str
    summary: str
    reference: str
    rules: Mapping[str, str]
    """Which rule updates each role of `optimizers.grouping.Role`."""
    options: Mapping[str, Option] = field(default_factory=dict)
    matrix_state: str
    """Values kept for a matrix of `rows` x `columns` under the main rule, as a formula for people."""
    values_per_parameter: float
    """The same for a square matrix, divided by its entries; step counters (one number a tensor) are not
    counted."""

    @property
    def state_bytes_per_parameter(self) -> float:
        """Bytes kept for each entry of a square float32 matrix."""
        return 4 * self.values_per_parameter


def _decay_rate(default: float, meaning: str) -> Option:
    return Option(default=default, low=0.0, high=1.0, meaning=meaning)


def _epsilon(default: float) -> Option:
    return Option(default=default, low=0.0, meaning="added to the denominator")


def _adam_options(beta1: float, beta2: float) -> dict[str, Option]:
    return {
        "beta1": _decay_rate(beta1, "decay of the first moment"),
        "beta2": _decay_rate(beta2, "decay of the second moment"),
        "eps": _epsilon(1e-8),
    }


_AUXILIARY = {
    "beta1": _decay_rate(0.9, "AdamW part (embedding, head, vectors): decay of the first moment"),
    "beta2": _decay_rate(0.95, "AdamW part: decay of the second moment"),
    "eps": Option(default=1e-8, low=0.0, meaning="AdamW part: added to the denominator"),
    "auxiliary_lr_ratio": Option(
        default=1.0, low=0.0, meaning="AdamW part: its learning rate as a share of the optimizer's"
    ),
}

_REFRESH = {
    "refresh_interval": Option(default=10, low=1, meaning="steps between refreshes of the bases"),
}

_MOMENTUM = {
    "momentum": _decay_rate(0.95, "decay of the averaged gradient"),
    "nesterov": Option(default=True, meaning="step along the look-ahead (1 - momentum) G + momentum M"),
}

_ORTHOGONAL = {
    "iteration": Option(
        default="newton-schulz",
        choices=("newton-schulz", "polar-express"),
        meaning="coefficients of the orthogonalization",
    ),
    "precision": Option(
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        meaning="what the orthogonalization computes in; auto: float32 on a CPU, bfloat16 elsewhere",
    ),
}

_METHODS = (
    Method(
        name="sgd",
        summary="gradient descent with averaged momentum",
        reference="Polyak 1964; Nesterov 1983",
        rules=_everywhere("sgd"),
        options={
            "momentum": _decay_rate(0.9, "decay of the averaged gradient; 0: none is kept"),
            "nesterov": Option(
                default=False, meaning="step along the look-ahead (1 - momentum) G + momentum M"
            ),
        },
        matrix_state="rows columns",
        values_per_parameter=1,
    ),
    Method(
        name="adamw",
        summary="Adam with decoupled weight decay",
        reference="arXiv 1711.05101",
        rules=_everywhere("adamw"),
        options=_adam_options(0.9, 0.95),
        matrix_state="2 rows columns",
        values_per_parameter=2,
    ),
    Method(
        name="nadamw",
        summary="Nesterov Adam with decoupled decay: asynchronous Nesterov",
        reference="arXiv 2505.01099",
        rules=_everywhere("nadamw"),
        options={
            **_adam_options(0.99, 0.999),
            "momentum_decay": Option(
                default=0.004, low=0.0, meaning="how fast the momentum warms up to beta1"
            ),
        },
        matrix_state="2 rows columns",
        values_per_parameter=2,
    ),
    Method(
        name="muon",
        summary="orthogonalized momentum on matrices, AdamW for the rest",
        reference="Jordan 2024; arXiv 2502.16982",
        rules=_on_matrices("muon"),
        options={
            **_MOMENTUM,
            "scale": Option(
                default="match-rms",
                choices=("match-rms", "original"),
                meaning="0.2 sqrt(max(rows, columns)), for AdamW's rates, or sqrt(max(1, rows / columns))",
            ),
            **_ORTHOGONAL,
            **_AUXILIARY,
        },
        matrix_state="rows columns",
        values_per_parameter=1,
    ),
    Method(
        name="normuon",
        summary="Muon with a second moment for each row",
        reference="arXiv 2510.05491",
        rules=_on_matrices("normuon"),
        options={
            **_MOMENTUM,
            "row_beta2": _decay_rate(0.95, "decay of the row-wise second moment"),
            "row_eps": _epsilon(1e-10),
            "scale": Option(
                default="match-rms",
                choices=("match-rms", "original"),
                meaning="root mean square of a step 0.2 lr, as in the paper, or steps as long as Muon's",
            ),
            **_ORTHOGONAL,
            **_AUXILIARY,
        },
        matrix_state="rows columns + rows",
        values_per_parameter=1,
    ),
    Method(
        name="soap",
        summary="Adam in the eigenbasis of Shampoo's preconditioner; AdamW for the rest",
        reference="arXiv 2409.11321",
        rules=_on_matrices("soap"),
        options={**_adam_options(0.95, 0.95), **_REFRESH},
        matrix_state="2 rows columns + 2 rows^2 + 2 columns^2",
        values_per_parameter=6,
    ),
    Method(
        name="adan",
        summary="Adam with a Nesterov look-ahead from gradient differences",
        reference="arXiv 2208.06677",
        rules=_everywhere("adan"),
        options={
            **_adam_options(0.98, 0.92),
            "beta2": _decay_rate(0.92, "decay of the gradient's change"),
            "beta3": _decay_rate(0.99, "decay of the second moment"),
        },
        matrix_state="4 rows columns",
        values_per_parameter=4,
    ),
    Method(
        name="lion",
        summary="sign of an interpolated momentum; wants 3 to 10 times smaller learning rates",
        reference="arXiv 2302.06675",
        rules=_everywhere("lion"),
        options={
            "beta1": _decay_rate(0.9, "interpolation between momentum and gradient in the step"),
            "beta2": _decay_rate(0.99, "decay of the momentum"),
        },
        matrix_state="rows columns",
        values_per_parameter=1,
    ),
    Method(
        name="mars",
        summary="Adam on a variance-reduced gradient; AdamW for vectors",
        reference="arXiv 2411.10438",
        rules={**_everywhere("mars"), "vector": "adamw"},
        options={
            **_adam_options(0.95, 0.99),
            "gamma": Option(default=0.025, low=0.0, meaning="weight of the gradient's change"),
            "vector_beta1": _decay_rate(0.9, "AdamW part (vectors): decay of the first moment"),
            "vector_beta2": _decay_rate(0.95, "AdamW part: decay of the second moment"),
        },
        matrix_state="3 rows columns",
        values_per_parameter=3,
    ),
    Method(
        name="scion",
        summary="steps of fixed norm: spectral on matrices, sign on embedding and head, AdamW on vectors",
        reference="arXiv 2502.07529",
        rules={
            "matrix": "scion-spectral",
            "embedding": "scion-sign",
            "head": "scion-sign",
            "vector": "adamw",
        },
        options={
            "momentum": _decay_rate(0.9, "decay of the averaged gradient"),
            "radius": Option(default=50.0, low=0.0, meaning="size of a step on matrices in blocks"),
            "sign_radius": Option(default=3000.0, low=0.0, meaning="size of a step on embedding and head"),
            "constrained": Option(
                default=False, meaning="shrink by lr in every step (weight decay 1), which bounds the weights"
            ),
            **_ORTHOGONAL,
            **_AUXILIARY,
        },
        matrix_state="rows columns",
        values_per_parameter=1,
    ),
    Method(
        name="basis-rotation",
        summary="Adam in a rotated basis; AdamW for the rest",
        reference="arXiv 2602.03515",
        rules=_on_matrices("basis-rotation"),
        options={
            **_adam_options(0.95, 0.95),
            "source": Option(
                default="second-moment",
                choices=("first-moment", "second-moment"),
                meaning="what the bases come from",
            ),
            "geometry": Option(
                default="bilateral",
                choices=("bilateral", "unilateral"),
                meaning="rotate both sides of a matrix or its smaller one",
            ),
            **_REFRESH,
            "stage_aware": Option(
                default=False, meaning="spend the same refreshes in all, more often where the delay is larger"
            ),
        },
        matrix_state="2 rows columns + 2 rows^2 + 2 columns^2",
        values_per_parameter=6,
    ),
)

METHODS: Mapping[str, Method] = {method.name: method for method in _METHODS}
NAMES: tuple[str, ...] = tuple(METHODS)


def method_named(name: str) -> Method:
    """The optimizer called `name`.

    Raises:
        ValueError: There is none; the message lists those there are.
    """
    if name not in METHODS:
        raise ValueError(f"unknown optimizer {name!r}; accepted: {', '.join(NAMES)}")
    return METHODS[name]


def check_options(name: str, options: Mapping[str, object]) -> dict[str, Value]:
    """The settings of optimizer `name`: `options` over its defaults.

    Raises:
        ValueError: Unknown optimizer or option, or a value not accepted; the message says what would be.
    """
    return settled(f"optimizer {name!r}", method_named(name).options, options)
