"""The weights and gradients of a stage: its versions, their flat buffers, and what the head shares."""
