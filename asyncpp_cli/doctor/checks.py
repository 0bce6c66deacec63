"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Check:
    """Result of one check."""

    check: str
    """Name of the check."""
    ok: bool
    """Whether runs can work."""
    detail: str
    """What was found."""
    advice: str = ""
    """What to change; if ok, what could be better or does not work."""

    @property
    def verdict(self) -> str:
        """`ok`, `note` (ok, with advice) or `wrong`."""
        if not self.ok:
            return "wrong"
        return "note" if self.advice else "ok"


def good(check: str, detail: str, *, note: str = "") -> Check:
    """A check that passed."""
    return Check(check=check, ok=True, detail=detail, advice=note)


def wrong(check: str, detail: str, *, advice: str) -> Check:
    """A check that failed."""
    return Check(check=check, ok=False, detail=detail, advice=advice)


def exchanged(kind: str, met: dict[str, Any]) -> str:
    """Library, transport and rate of an exchange, as far as `stages.comm.handshake` knows them."""
    by = f"{kind} by {met[f'{kind}_transport']}" if met.get(f"{kind}_transport") else kind
    return f"{by}, {met[f'{kind}_rate']:.3g} GB/s" if f"{kind}_rate" in met else by
