"""Submitting runs to SLURM as job arrays: shapes, throttles, scripts, code snapshots."""
