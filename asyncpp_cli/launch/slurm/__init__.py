"""SLURM's commands, submissions, and the status of an experiment's jobs and nodes."""
