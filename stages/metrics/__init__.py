"""Metrics rows of a run."""
