"""The optimizers by name: each declared once. Imports no torch, so that the command line starts quickly.

To add one, write its update rule as a file in `optimizers/rules/` and declare it here.
"""

from __future__ import annotations

from collections.abc import Mapping

from optimizers.declaration import Method, Rule, Settings, custom_method
from optimizers.named import is_custom
from optimizers.options import (
    AUXILIARY,
    MOMENTUM,
    ORTHOGONAL,
    REFRESH,
    Option,
    Value,
    adam_options,
    decay_rate,
    epsilon,
    orthogonal_flops,
    settled,
)


def _rotation_state(settings: Settings) -> str:
    copies = 2 if settings["source"] == "second-moment" else 1
    sides = ("rows", "columns") if settings["geometry"] == "bilateral" else ("smaller",)
    return " + ".join(["2 rows columns", *(f"{copies} {side}^2" for side in sides)])


def _look_ahead(settings: Settings) -> str:
    return "rows columns" if settings["nesterov"] else "0"


def _orthogonal_growth(settings: Settings) -> float:
    return 0.5 if settings["scale"] == "match-rms" else 0.0


def _orthogonal(settings: Settings, smaller: int, larger: int) -> int:
    return orthogonal_flops(smaller, larger, str(settings["iteration"]))


_ADAMW = Rule(
    name="adamw",
    elementwise=True,
    factory="optimizers.rules.adam:adamw",
    state="2 rows columns",
    momentum="exp_avg",
    auxiliary=True,
    adam_moments=True,
    growth=1,
)

_AUXILIARY_ADAMW = {"embedding": _ADAMW, "head": _ADAMW, "vector": _ADAMW, "router": _ADAMW}
"""Roles that the optimizers of matrices leave to AdamW."""

_SCION_SIGN = Rule(
    name="scion-sign",
    factory="optimizers.rules.scion:ScionSign",
    # With a decay of 1 the rate of embedding and head, which would grow, is that of their shrinking, too.
    growth=lambda settings: None if settings["constrained"] else 0,
    batch="rows columns",
    state="rows columns",
    momentum="momentum",
)

_METHODS = (
    Method(
        name="sgd",
        summary="gradient descent with averaged momentum",
        reference="Polyak 1964; Nesterov 1983",
        main=Rule(
            name="sgd",
            elementwise=True,
            factory="optimizers.rules.sgd:SGD",
            step=_look_ahead,
            state=lambda settings: "rows columns" if settings["momentum"] else "0",
            momentum="momentum",
        ),
        options={
            "momentum": decay_rate(0.9, "decay of the averaged gradient; 0: none is kept"),
            "nesterov": Option(
                default=False, meaning="step along the look-ahead (1 - momentum) G + momentum M"
            ),
        },
    ),
    Method(
        name="adamw",
        summary="Adam with decoupled weight decay",
        reference="arXiv 1711.05101",
        main=_ADAMW,
        options=adam_options(0.9, 0.95),
    ),
    Method(
        name="nadamw",
        summary="Nesterov Adam with decoupled decay: asynchronous Nesterov",
        reference="arXiv 2505.01099",
        main=Rule(
            name="nadamw",
            elementwise=True,
            factory="optimizers.rules.adam:nadamw",
            growth=1,
            step="rows columns",
            state="2 rows columns",
            momentum="exp_avg",
        ),
        options={
            **adam_options(0.99, 0.999),
            "momentum_decay": Option(
                default=0.004, low=0.0, meaning="how fast the momentum warms up to beta1"
            ),
        },
    ),
    Method(
        name="qhadamw",
        summary="AdamW along a mixture of gradient and momentum, for a delay of one",
        reference="arXiv 1810.06801",
        main=Rule(
            name="qhadamw",
            elementwise=True,
            factory="optimizers.rules.qhadamw:QHAdamW",
            growth=1,
            step="2 rows columns",
            state="2 rows columns",
            momentum="exp_avg",
        ),
        options={
            # Under a delay of one these end level with synchronous AdamW in 4,800 steps and more
            # (benchmarks/results/delayed-adamw-*).
            **adam_options(0.95, 0.95),
            "momentum_weight": Option(
                default=0.75,
                low=0.0,
                high=1.0,
                meaning="share of the momentum in the step; beta1: Nesterov's momentum, near 1: AdamW",
            ),
        },
    ),
    Method(
        name="muon",
        summary="orthogonalized momentum on matrices, AdamW for the rest",
        reference="Jordan 2024; arXiv 2502.16982",
        main=Rule(
            name="muon",
            factory="optimizers.rules.muon:Muon",
            growth=_orthogonal_growth,
            step=_look_ahead,
            batch="3 rows columns + smaller smaller",
            state="rows columns",
            flops=_orthogonal,
            momentum="momentum",
        ),
        others=_AUXILIARY_ADAMW,
        options={
            **MOMENTUM,
            "scale": Option(
                default="match-rms",
                choices=("match-rms", "original"),
                meaning="0.2 sqrt(max(rows, columns)), for AdamW's rates, or sqrt(max(1, rows / columns))",
            ),
            **ORTHOGONAL,
            **AUXILIARY,
        },
    ),
    Method(
        name="normuon",
        summary="Muon with a second moment for each row",
        reference="arXiv 2510.05491",
        main=Rule(
            name="normuon",
            factory="optimizers.rules.normuon:NorMuon",
            # With match-rms the Frobenius norm is fixed: the spectral norm follows the rank of the momentum.
            growth=lambda settings: None if settings["scale"] == "match-rms" else 0,
            step=_look_ahead,
            batch="3 rows columns + smaller smaller",
            state="rows columns + rows",
            flops=_orthogonal,
            momentum="momentum",
        ),
        others=_AUXILIARY_ADAMW,
        options={
            **MOMENTUM,
            "row_beta2": decay_rate(0.95, "decay of the row-wise second moment"),
            "row_eps": epsilon(1e-10),
            "scale": Option(
                default="match-rms",
                choices=("match-rms", "original"),
                meaning="root mean square of a step 0.2 lr, as in the paper, or steps as long as Muon's",
            ),
            **ORTHOGONAL,
            **AUXILIARY,
        },
    ),
    Method(
        name="soap",
        summary="Adam in the eigenbasis of Shampoo's preconditioner; AdamW for the rest",
        reference="arXiv 2409.11321",
        main=Rule(
            name="soap",
            factory="optimizers.rules.soap:Soap",
            state="2 rows columns + 2 rows^2 + 2 columns^2",
            batch="4 rows columns + 6 larger^2 + smaller^2",
        ),
        others=_AUXILIARY_ADAMW,
        options={**adam_options(0.95, 0.95), **REFRESH},
    ),
    Method(
        name="adan",
        summary="Adam with a Nesterov look-ahead from gradient differences",
        reference="arXiv 2208.06677",
        main=Rule(
            name="adan",
            elementwise=True,
            factory="optimizers.rules.adan:Adan",
            growth=1,
            step="2 rows columns",
            state="4 rows columns",
            momentum="first",
        ),
        options={
            **adam_options(0.98, 0.92),
            "beta2": decay_rate(0.92, "decay of the gradient's change"),
            "beta3": decay_rate(0.99, "decay of the second moment"),
        },
    ),
    Method(
        name="lion",
        summary="sign of an interpolated momentum; wants 3 to 10 times smaller learning rates",
        reference="arXiv 2302.06675",
        main=Rule(
            name="lion",
            elementwise=True,
            factory="optimizers.rules.lion:Lion",
            growth=1,
            state="rows columns",
            step="rows columns",
            momentum="momentum",
        ),
        options={
            "beta1": decay_rate(0.9, "interpolation between momentum and gradient in the step"),
            "beta2": decay_rate(0.99, "decay of the momentum"),
        },
    ),
    Method(
        name="mars",
        summary="Adam on a variance-reduced gradient; AdamW for vectors",
        reference="arXiv 2411.10438",
        main=Rule(
            name="mars",
            factory="optimizers.rules.mars:Mars",
            growth=1,
            state="3 rows columns",
            step="2 rows columns",
            momentum="first",
        ),
        others={"vector": _ADAMW, "router": _ADAMW},
        options={
            **adam_options(0.95, 0.99),
            "gamma": Option(default=0.025, low=0.0, meaning="weight of the gradient's change"),
            "vector_beta1": decay_rate(0.9, "AdamW part (vectors): decay of the first moment"),
            "vector_beta2": decay_rate(0.95, "AdamW part: decay of the second moment"),
        },
    ),
    Method(
        name="scion",
        summary="steps of fixed norm: spectral on matrices, sign on embedding and head, AdamW for the rest",
        reference="arXiv 2502.07529",
        main=Rule(
            name="scion-spectral",
            factory="optimizers.rules.scion:ScionSpectral",
            growth=0,
            batch="3 rows columns + smaller smaller",
            state="rows columns",
            flops=_orthogonal,
            momentum="momentum",
        ),
        others={"embedding": _SCION_SIGN, "head": _SCION_SIGN, "vector": _ADAMW, "router": _ADAMW},
        options={
            "momentum": decay_rate(0.9, "decay of the averaged gradient"),
            "radius": Option(default=50.0, low=0.0, meaning="size of a step on matrices in blocks"),
            "sign_radius": Option(default=3000.0, low=0.0, meaning="size of a step on embedding and head"),
            "constrained": Option(
                default=False, meaning="shrink by lr in every step (weight decay 1), which bounds the weights"
            ),
            **ORTHOGONAL,
            **AUXILIARY,
        },
    ),
    Method(
        name="basis-rotation",
        summary="Adam in a rotated basis; AdamW for the rest",
        reference="arXiv 2602.03515",
        main=Rule(
            name="basis-rotation",
            factory="optimizers.rules.basis_rotation:BasisRotation",
            batch="2 rows columns + 6 larger^2 + smaller^2",
            state=_rotation_state,
        ),
        others=_AUXILIARY_ADAMW,
        options={
            **adam_options(0.95, 0.95),
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
            **REFRESH,
            "stage_aware": Option(
                default=False, meaning="refresh more often on stages with a larger delay, with the same total"
            ),
        },
    ),
)

METHODS: Mapping[str, Method] = {method.name: method for method in _METHODS}
NAMES: tuple[str, ...] = tuple(METHODS)


def method_named(name: str) -> Method:
    """The optimizer called `name`; a custom one where that is `package.module:name`.

    Raises:
        ValueError: Unknown optimizer; the message lists those accepted.
    """
    if is_custom(name):
        return custom_method(name)
    if name not in METHODS:
        raise ValueError(f"unknown optimizer {name!r}; accepted: {', '.join(NAMES)}")
    return METHODS[name]


def check_options(name: str, options: Mapping[str, Value]) -> dict[str, Value]:
    """The settings of optimizer `name`: `options` over its defaults.

    A custom optimizer checks its options itself.

    Raises:
        ValueError: Unknown optimizer or option, or a value not accepted; the message says what would be.
    """
    if is_custom(name):
        return dict(options)
    return settled(f"optimizer {name!r}", method_named(name).options, options)
