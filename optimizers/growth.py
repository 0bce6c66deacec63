"""How learning rate, weight decay and epsilon follow a model's size, for `model.parametrization: mup`.

A step should change a layer's output by as much at any width: on a matrix both of whose sides grow with the
width its spectral norm should not grow (arXiv 2310.17813), and embedding, head and vectors should move by as
much per entry, where the logits are divided by the width. Each rule declares the power p of the width m with
which the spectral norm of its steps on such a matrix grows (`Rule.growth`). Imports no torch.

    rule                              p      learning rate on matrices   on embedding, head, vectors
    AdamW and others with entries     1      1 / m                       1
    Muon, match-rms                   1/2    1 / sqrt(m)
    Muon, NorMuon, original; Scion    0      1                           m (Scion's signs, divided by m)

The learning rate does not depend on the depth (arXiv 2505.01618, alpha = 1). Weight decay is divided by the
factor of the learning rate, so that W shrinks as fast. Gradients are smaller by m, in blocks by m times the
depth, and so is Adam's epsilon (there, equation 40).
"""

from __future__ import annotations

from typing import NamedTuple

from optimizers.declaration import Method, Rule, Settings

GROWING = frozenset({"matrix"})
"""Roles of matrices both of whose sides grow with the width."""
IN_BLOCKS = frozenset({"matrix", "vector"})
"""Roles whose gradients are smaller in a deeper model; the last norm's vector is taken for one of them."""


class Growth(NamedTuple):
    """A model's size over that of its base model."""

    width: float = 1.0
    depth: float = 1.0

    def lr_factor(self, rule: Rule, role: str, settings: Settings) -> float:
        """Factor of a rule's learning rate on parameters of a role.

        Raises:
            ValueError: it is not known for this rule.
        """
        if self.width == 1:
            return 1.0
        power = rule.growth_power(settings)
        if power is None:
            raise ValueError(f"how steps of {rule.name} should follow the width is not known")
        return float(self.width ** ((0 if role in GROWING else 1) - power))

    def epsilon_factor(self, role: str) -> float:
        """Factor of the epsilon that Adam and its relatives add to the root of the second moment: as small as
        the gradients of parameters of this role."""
        return 1 / (self.width * (self.depth if role in IN_BLOCKS else 1.0))


def growth_refusal(method: Method, settings: Settings) -> str | None:
    """Why learning rates of an optimizer cannot follow the width; None if they can."""
    rules = (method.main, *method.others.values())
    unknown = {rule.name for rule in rules if rule.growth_power(settings) is None}
    return f"how steps of {min(unknown)} should follow the width is not known" if unknown else None
