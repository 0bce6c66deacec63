"""Launching runs on this machine or on a SLURM cluster, watching and cancelling them."""
