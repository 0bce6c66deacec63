"""SLURM's commands, what was submitted, and the status of runs and their jobs."""
