"""What goes wrong by a user's hand, as opposed to ours."""

from __future__ import annotations


class UserError(Exception):
    """A mistake of the user's: one line on standard error, exit code 2."""


class DamagedError(Exception):
    """A file of a run that cannot be read: truncated, of another form, or of a newer asyncpp."""
