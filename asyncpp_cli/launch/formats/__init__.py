"""Runs as other schedulers are told of them: a description of each, and one file per format."""
