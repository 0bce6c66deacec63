"""Backward passes: selective recomputation, split backward, gradients of weights."""
