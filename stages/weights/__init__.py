"""Buffers and versions of a stage's weights."""
