"""The one error of this package."""

from __future__ import annotations


class ScheduleError(ValueError):
    """A schedule that cannot be built, or a wrong program; the message says what and where."""
