"""Declares a configuration key: its default, and what it accepts. Imports no torch.

    steps: int = key(MISSING, low=1, high=10**7)

The checks, the run ids and docs/configuration.md follow from the field. Upper bounds are far beyond any
real run. They keep `sweep` from spending minutes on a typo, and a run from failing where a number leaves the
range of float32, signed 64-bit integers, or the system's clocks.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field
from typing import Any

MISSING: Any = "???"
"""Default of a key that must be set."""

LARGEST = 1e9
"""Upper bound of a number whose key declares none: products of three stay within float32."""


@dataclass(frozen=True, kw_only=True)
class KeyFacts:
    """What a key accepts. Bounds do not hold for null, nor for text, lists and booleans."""

    low: float | None = None
    """Smallest accepted number."""
    above: float | None = None
    """Accepted numbers are larger."""
    below: float | None = None
    """Accepted numbers are smaller."""
    high: float = LARGEST
    """Largest accepted number, with either sign."""
    choices: tuple[str, ...] = ()
    """Accepted texts, where the key is not null; empty: any."""
    also: str = ""
    """What else is accepted, for messages: null, or the form of a name of the user's own code (with a
    colon)."""
    set_by: Mapping[str, str] = field(default_factory=dict)
    """What to set instead, by texts that are not accepted here."""
    option: bool = False
    """The key is an option of the section's optimizers or corrections."""

    def refusal(self, value: object) -> str | None:
        """Why `value` is not accepted; None if it is."""
        if isinstance(value, str) and self.choices and value not in self.choices:
            if ":" in self.also and ":" in value:
                return None
            if (instead := self.set_by.get(value)) is None:
                return unknown(value, (*self.choices, self.also) if self.also else self.choices)
            return f"{value!r} is set by {instead}; accepted: {', '.join(self.choices)}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if self.low is not None and not value >= self.low:
            return f"is {_shown(value)}, must be at least {_shown(self.low)}"
        if self.above is not None and not value > self.above:
            return f"is {_shown(value)}, must be above {_shown(self.above)}"
        if self.below is not None and not value < self.below:
            return f"is {_shown(value)}, must be below {_shown(self.below)}"
        if not abs(value) <= self.high:
            return f"is {_shown(value)}, must be at most {_shown(self.high)}"
        return None


def unknown(value: object, accepted: Iterable[str]) -> str:
    """Why a value is refused that is none of those accepted, with the one that it may misspell."""
    names = list(accepted)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{value!r} is not known; {hint}accepted: {', '.join(names)}"


def key(
    default: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    below: float | None = None,
    high: float = LARGEST,
    choices: tuple[str, ...] = (),
    also: str = "",
    set_by: Mapping[str, str] | None = None,
) -> Any:
    """A field of a section that accepts what `KeyFacts` describes."""
    declared = KeyFacts(
        low=low, above=above, below=below, high=high, choices=choices, also=also, set_by=set_by or {}
    )
    return field(default=default, metadata={"key": declared})


def facts(declared: Field[Any]) -> KeyFacts:
    """What a field of a section accepts; a field without `key` has the defaults of `KeyFacts`."""
    found = declared.metadata.get("key", KeyFacts())
    assert isinstance(found, KeyFacts)
    return found


def option() -> Any:
    """A field for an option of the section's optimizers or corrections, which declare what they accept."""
    return field(default=None, metadata={"key": KeyFacts(option=True)})


def _shown(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 2**64 else "beyond 64 bits"
    return f"{value:g}"
