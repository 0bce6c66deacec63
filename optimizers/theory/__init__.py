"""Stability and convergence under delay on small problems."""
