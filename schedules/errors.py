"""The one error of this package."""

from __future__ import annotations


class ScheduleError(ValueError):
    """A schedule that cannot be built, or a program that is wrong; the message says what and where, for
    people.
    """
