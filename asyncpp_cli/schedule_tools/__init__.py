"""Shared parts of the commands of `asyncpp schedule`."""
