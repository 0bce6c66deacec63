"""Attempts that tests claim themselves."""

from __future__ import annotations

from typing import Any

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.runs.run_folder import Run


def claimed(run: Run, **how: Any) -> Attempt:
    """The next attempt at a run, claimed by this process (`claim`)."""
    attempt = claim(run, **how)
    assert attempt is not None
    return attempt
