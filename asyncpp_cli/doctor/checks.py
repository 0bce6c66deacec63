"""What a check finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    check: str
    """Its name."""
    ok: bool
    """Whether runs can do with it as it is."""
    detail: str
    """What was found."""
    advice: str = ""
    """What to change. Where it is ok: what would be better, or what goes without it."""

    @property
    def word(self) -> str:
        """`ok`, `note` (ok, but there is something to say) or `wrong`."""
        if not self.ok:
            return "wrong"
        return "note" if self.advice else "ok"


def good(check: str, detail: str, *, note: str = "") -> Check:
    """What runs can do with."""
    return Check(check=check, ok=True, detail=detail, advice=note)


def wrong(check: str, detail: str, *, advice: str) -> Check:
    """What runs cannot do with."""
    return Check(check=check, ok=False, detail=detail, advice=advice)
