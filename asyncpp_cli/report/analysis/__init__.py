"""Averages runs into cells and compares cells."""
