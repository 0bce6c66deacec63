"""Trackers that a run's metrics are mirrored into. The run's own files stay the truth; no mirror is read."""
