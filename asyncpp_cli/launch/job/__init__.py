"""Processes inside a SLURM job: the array task, and the ranks that it starts."""
