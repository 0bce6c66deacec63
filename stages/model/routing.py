"""The router's decision, and what it reads and reports besides activations.

A block of experts is a function of activations, weights and the balance bias:

    block(x, rotation, bias, documents) -> (output, load)

`bias`, float32 `(E,)`, is added to the scores for the selection alone and has no gradient. `load`, int64
`(E,)`, counts the block's tokens by chosen expert. The bias belongs to a weight version, like a weight, but
is not a parameter: whoever runs a micro-batch passes a `Routing` with the biases of the version that its
forward reads to `Stage.forward`, and finds the loads in it afterwards.

Backward does not read the bias. Recomputation reads the tensor that the forward read, so a bias is replaced
by another tensor rather than written in place. The loads of recomputation are dropped: each micro-batch is
counted once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

_SMALLEST_SUM = 1e-20
"""Added to the sum of the chosen scores before dividing by it: all of them may be 0."""


@dataclass(frozen=True)
class Routing:
    """What routes one micro-batch through the blocks of a stage, and how it was routed."""

    biases: Mapping[int, Tensor]
    """For each block of experts, by its number in the model: its balance bias, float32 `(E,)`."""
    loads: dict[int, Tensor] = field(default_factory=dict)
    """Likewise: number of tokens by expert, int64 `(E,)`. Filled by the forward."""


def route(
    logits: Tensor, bias: Tensor, *, active: int, score: str, normalised: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose experts for each token (arXiv 2412.19437, section 2.1.2).

    Args:
        logits: of the router, `(tokens, E)`.
        bias: added to the scores for the selection, `(E,)`.
        active: experts for each token, k.
        score: `sigmoid`, or `softmax` over all experts.
        normalised: divide the weights of a token by their sum.
        scale: factor of the weights.

    Returns:
        Weights of the chosen experts and their numbers (int64), both `(tokens, k)`.
    """
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(dim=-1)
    chosen = (scores.detach() + bias).topk(active, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _SMALLEST_SUM)
    return weights * scale, chosen
