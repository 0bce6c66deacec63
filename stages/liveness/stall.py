"""When a run counts as stalled: one rule, for its own processes and for those that watch it from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from stages.config import SiteConfig

Phase = Literal["", "building", "disk", "start"]

_TIMEOUTS = 2.0
"""Timeouts without progress after which a process counts as stalled."""

_BUILDING = 5.0
"""Factor of the limit while the model is built, since the user's own code may be imported and run."""


def stall_limits(site: SiteConfig) -> Mapping[Phase, float]:
    """Seconds without progress after which a process counts as stalled, by phase: it exchanges messages,
    builds its stage, reads or writes a checkpoint or text, or waits for the slowest process to start."""
    return {
        "": _TIMEOUTS * site.timeout,
        "building": _TIMEOUTS * site.timeout * _BUILDING,
        "disk": _TIMEOUTS * max(site.timeout, site.save_timeout),
        "start": _TIMEOUTS * max(site.timeout, site.start_timeout),
    }


def longest_silence(site: SiteConfig) -> float:
    """Seconds without a heartbeat after which a run counts as stalled, whatever phase it is in."""
    return max(stall_limits(site).values())
