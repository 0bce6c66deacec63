"""How many values a message between stages has per token. Imports no torch.

All messages have the type of the activations. Sums of a softmax need at least float32: one takes two values
where activations are bfloat16.
"""

from __future__ import annotations

from schedules.messages import Kind


def message_width(kind: Kind, *, width: int, per_wide: int) -> int:
    """Values per token.

    Args:
        kind: of the message.
        width: of the model.
        per_wide: values of a message that hold one number of at least float32.
    """
    if kind is Kind.PART:
        # Two terms of the gradient of the hidden states, and per token the logarithm of the shard's sum and
        # the logit of the target.
        return 2 * width + 2 * per_wide
    return per_wide if kind is Kind.SUMS else width
