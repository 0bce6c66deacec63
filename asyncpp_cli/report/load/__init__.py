"""Loads run folders and computes the numbers of each run."""
