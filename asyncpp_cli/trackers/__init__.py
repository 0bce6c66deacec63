"""Mirrors of a run's metrics for trackers. The run's own files stay the truth; nothing here is read back."""
