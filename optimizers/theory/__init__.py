"""Stability of momentum under delay on a quadratic."""
