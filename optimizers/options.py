"""Options of optimizers and corrections: defaults, accepted values and messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Value = float | bool | str


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of an optimizer or a correction."""

    default: Value
    meaning: str
    low: float | None = None
    """Smallest accepted number."""
    high: float | None = None
    """Accepted numbers are smaller."""
    choices: tuple[str, ...] = ()
    """Accepted values of an option that is text."""

    def accepts(self) -> str:
        """Description of the accepted values."""
        if self.choices:
            return " | ".join(self.choices)
        if isinstance(self.default, bool):
            return "true | false"
        whole = "a whole number" if isinstance(self.default, int) else "a number"
        bounds = [f"at least {self.low:g}"] if self.low is not None else []
        bounds += [f"below {self.high:g}"] if self.high is not None else []
        return " ".join([whole, " and ".join(bounds)]).strip()

    def holds(self, value: object) -> bool:
        """Whether `value` is accepted."""
        if self.choices:
            return value in self.choices
        if isinstance(self.default, bool):
            return isinstance(value, bool)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if isinstance(self.default, int) and value != int(value):
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value < self.high)


def settled(owner: str, accepted: Mapping[str, Option], options: Mapping[str, object]) -> dict[str, Value]:
    """`options` over the defaults of `accepted`.

    Args:
        owner: Optimizer or correction, for messages.
        accepted: Its options.
        options: The given values.

    Raises:
        ValueError: An unknown option, or a value that is not accepted; the message says what is.
    """
    settings: dict[str, Value] = {key: option.default for key, option in accepted.items()}
    for key, value in options.items():
        if key not in accepted:
            raise ValueError(f"{owner} has no option {key!r}; accepted: {', '.join(accepted) or 'none'}")
        if not accepted[key].holds(value):
            raise ValueError(f"{owner}: {key} is {value!r}, accepted: {accepted[key].accepts()}")
        assert isinstance(value, float | int | str)
        settings[key] = value
    return settings
