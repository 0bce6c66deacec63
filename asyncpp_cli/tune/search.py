"""What is tuned over: ranges and lists of values, and the points to try."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.template import SHORTHANDS, canonical, parse_setting
from asyncpp_cli.runs.settings import SettingError, typed

Point = Mapping[str, Any]
"""A value for each key that is tuned over."""

_ACCEPTED = "accepted: KEY=LOW:HIGH, KEY=LOW:HIGH:log, or KEY=[A,B,C]"
_DIGITS = 3
"""Significant digits of a value from a range: finer differences are the same setting."""
_DRAWS = 100
"""Draws for each point; fewer are needed unless the range has too few values."""


@dataclass(frozen=True, kw_only=True)
class Over:
    """A key that is tuned over: a range of numbers, or a list of values."""

    key: str
    values: tuple[Any, ...] = ()
    """Empty for a range."""
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def at(self, share: float) -> Any:
        """The value at a share of the range, in 0..1, rounded to three digits."""
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return _accepted(self.key, float(f"{value:.{_DIGITS}g}"))


def parse_over(text: str) -> Over:
    """Read `KEY=LOW:HIGH`, `KEY=LOW:HIGH:log` or `KEY=[A,B,C]`.

    Raises:
        UserError: it is none of these, or the key does not accept the values.
    """
    given, equals, range_or_list = text.partition("=")
    key = canonical(given.strip())
    if not equals or not key:
        raise UserError(f"--over {text!r}: {_ACCEPTED}")
    if range_or_list.lstrip().startswith("["):
        values = parse_setting(given, range_or_list)
        if not isinstance(values, list) or not values:
            raise UserError(f"--over {text!r}: {_ACCEPTED}")
        if len({repr(value) for value in values}) < len(values):
            raise UserError(f"--over {text!r}: a value is given twice")
        return Over(key=key, values=tuple(_accepted(key, value) for value in values))
    low, high, *scale = range_or_list.split(":")[:4] if ":" in range_or_list else ("", "")
    try:
        over = Over(key=key, low=float(low), high=float(high), log=scale == ["log"])
    except ValueError:
        raise UserError(f"--over {text!r}: {_ACCEPTED}") from None
    if scale not in ([], ["log"]) or not (math.isfinite(over.low) and over.low < over.high < math.inf):
        raise UserError(f"--over {text!r}: LOW must be less than HIGH, and `log` may follow; {_ACCEPTED}")
    if over.log and over.low <= 0:
        raise UserError(f"--over {text!r}: a range in the logarithm begins above 0")
    for share in (0.0, 1.0):
        over.at(share)
    return over


def points(overs: Sequence[Over], *, samples: int, search_seed: int | None) -> list[Point]:
    """The points to try, the same for every arm.

    Args:
        overs: keys to tune over.
        samples: values of each range or, with a seed, points in all.
        search_seed: draws the points at random, evenly in each range; None: a grid, the product of `samples`
            evenly spaced values of each range and of the lists.

    Raises:
        UserError: a key is given twice, or a range has fewer values.
    """
    keys = [over.key for over in overs]
    if duplicates := sorted({key for key in keys if keys.count(key) > 1}):
        raise UserError(f"--over {duplicates[0]} is given twice")
    if search_seed is not None:
        return _drawn(overs, samples=samples, seed=search_seed)
    axes = [list(over.values) or _spaced(over, samples) for over in overs]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*axes)]


def _spaced(over: Over, samples: int) -> list[Any]:
    values = [over.at(index / max(1, samples - 1)) for index in range(samples)]
    if len(set(values)) < samples:
        raise UserError(f"--over {over.key}: the range has fewer than {samples} values; give fewer --samples")
    return values


def _drawn(overs: Sequence[Over], *, samples: int, seed: int) -> list[Point]:
    chance = random.Random(seed)
    drawn: dict[str, Point] = {}
    for _ in range(_DRAWS * samples):
        # One number for each key, whatever its kind, so that further keys leave the first ones' values.
        shares = [chance.random() for _ in overs]
        point = {
            over.key: over.values[int(share * len(over.values))] if over.values else over.at(share)
            for over, share in zip(overs, shares, strict=True)
        }
        drawn.setdefault(repr(point), point)
        if len(drawn) == samples:
            return sorted(drawn.values(), key=lambda point: [_order(value) for value in point.values()])
    raise UserError(f"--over: there are fewer than {samples} points to try; give fewer --samples")


def _order(value: Any) -> tuple[bool, float, str]:
    """A key to sort by: numbers first."""
    is_number = isinstance(value, int | float)
    return not is_number, value if is_number else 0.0, str(value)


def _accepted(key: str, value: Any) -> Any:
    """The value as its key takes it; a number is rounded where it takes integers.

    Raises:
        UserError: the key is unknown, or does not accept it.
    """
    dotted = SHORTHANDS.get(key, key)
    try:
        if key == "model" or (key == "error_feedback" and isinstance(value, bool)):
            return value
        try:
            return typed(dotted, value)
        except SettingError:
            if not isinstance(value, float):
                raise
            return typed(dotted, round(value))
    except SettingError as error:
        raise UserError(f"--over {error.key}: {error}") from error
