"""Launching on this machine, one supervisor for each run."""
