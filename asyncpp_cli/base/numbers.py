"""Numbers given on the command line."""

from __future__ import annotations

import math

import typer


def finite(text: str | float) -> float:
    """The value of an option that takes a number: every such option has this `parser`.

    Raises:
        typer.BadParameter: the text is not a number, or is infinite or NaN.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise typer.BadParameter(f"{text!r}, accepted: a finite number")
    return number
