"""Launching on this machine, through submitit's local executor."""
