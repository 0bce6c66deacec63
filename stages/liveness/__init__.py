"""Hang detection and signals to stop."""
