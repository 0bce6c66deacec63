"""Scores and samples of a run's checkpoints."""
