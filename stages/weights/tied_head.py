"""The head's use of the embedding's matrix, where another stage of the same rank has the embedding.

The embedding's stage owns the matrix: its versions, its master copy and the optimizer's state. The head's
stage computes with the same memory, and gathers its gradient apart, because its steps end before the
embedding's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stages.model.gradients.split_backward import Linear
from stages.weights.weight_versions import WeightVersions

EMBEDDING, HEAD = "embedding.weight", "head.weight"


class TiedHead:
    """The head's view of the embedding's matrix.

    Args:
        head: weights of the stage with the head; it holds as many versions as the embedding's.
        embedding: weights of the stage with the embedding.
    """

    def __init__(self, head: WeightVersions, *, embedding: WeightVersions) -> None:
        self._embedding = embedding
        self._number = embedding.names.index(EMBEDDING)
        self.gradient = torch.zeros_like(embedding.gradient_buffer.views[self._number])
        """What the head's backwards have gathered since the head's latest update."""
        # Both stages write their versions in the same order, so replicas of one number hold one version.
        for replica, source in zip(head.replicas, embedding.replicas, strict=True):
            # Another parameter of the same memory and version counter, whose gradient is gathered here.
            shared = nn.Parameter(source.parameters[self._number])
            if shared.dtype != self.gradient.dtype:
                shared.grad_dtype = self.gradient.dtype
            shared.grad = self.gradient
            assert isinstance(replica.module.head, Linear)
            replica.module.head.weight = shared

    @torch.no_grad()
    def hand_over(self) -> None:
        """Add the head's gradient of a step to the embedding's, which gathers for the same step.

        `stages.resolve` checks that it does.
        """
        self._embedding.gradient_buffer.views[self._number].add_(self.gradient)
        self.clear()

    def clear(self) -> None:
        """Discard what has been gathered."""
        self.gradient.zero_()

    def weights(self, embedding: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The head's matrix by its name, from the weights of the embedding's stage by name."""
        return {HEAD: embedding[EMBEDDING]}
