"""Corrections for stale gradients."""
