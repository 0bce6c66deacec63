"""From gathered gradients to the next weight version: reduction, clipping, optimizer step, correction."""
