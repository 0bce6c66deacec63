"""Schedules: one file each."""
