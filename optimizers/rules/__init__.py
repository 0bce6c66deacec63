"""Optimizers: one file each, and what they share."""
