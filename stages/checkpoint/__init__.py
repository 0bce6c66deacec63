"""Checkpoints: written, read, exported, and used as initial weights."""
