"""Attempts at a run: claiming one, its ranks, its outcome."""
