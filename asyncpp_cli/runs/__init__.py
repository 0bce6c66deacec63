"""Experiment and run folders: their files, attempts, status and logs."""
