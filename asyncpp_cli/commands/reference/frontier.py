"""`asyncpp theory frontier`: momentum as a filter under delay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncpp_cli.console import say
from asyncpp_cli.numbers import finite

if TYPE_CHECKING:
    from optimizers.theory.frontier import Point

_QUIET = 0.9
"""Share of the largest limit that the frontier's quieter points keep."""

_LONGEST = 10_000


def frontier(
    delay: Annotated[
        int, typer.Option(min=0, max=32, help="Updates between a gradient's weights and its update.")
    ] = 1,
    lags: Annotated[
        str, typer.Option(help="Lags of the frontier's points, in updates, with commas between.")
    ] = "2,5,10,20,40,80",
    step: Annotated[
        float, typer.Option(parser=finite, help="Learning rate x curvature of the column `variance`.")
    ] = 0.5,
    small_step: Annotated[
        float, typer.Option(parser=finite, help="Learning rate x curvature of the column `settling`.")
    ] = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Optimizers and frontier as JSON.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it, too: SVG, PNG or PDF; needs the extra `plot`."),
    ] = None,
) -> None:
    """Optimizers' momentum as a filter under delay, and the best filters.

    The family is M <- beta M + (1 - beta) G, a step along (1 - w) G + w M, and error feedback of c. `limit`
    is the largest stable learning rate x curvature, `noise` the variance of an update for gradients of white
    noise, `lag` the mean age of the gradients in it, `settling` the updates in which the slowest error falls
    by e where the curvature is low, `variance` that of the weights over synchronous descent's. `share` is
    the limit over the largest one with the same lag and no more noise.
    """
    import json

    from asyncpp_cli.console import show_table
    from asyncpp_cli.errors import UserError, drawing
    from optimizers.theory import frontier as theory

    try:
        wanted = sorted({float(text) for text in lags.split(",")})
        if not all(0 <= number <= _LONGEST for number in wanted):
            raise ValueError
    except ValueError:
        raise UserError(
            f"--lags is {lags!r}, accepted: numbers up to {_LONGEST}, with commas between"
        ) from None
    for option, value in (("--step", step), ("--small-step", small_step)):
        if value <= 0:
            raise UserError(f"{option} is {value:g}, accepted: above 0")
    named = {name: theory.point(found, delay=delay) for name, found in theory.NAMED.items()}
    pairs = theory.frontier(delay=delay, lags=wanted, share=_QUIET)
    if out is not None:
        from optimizers.theory.picture import draw_frontier

        with drawing(out):
            draw_frontier(named, [best for best, _ in pairs], delay=delay, file=out)
        say(f"Wrote {out}")
    shares = [theory.share_of_frontier(found, delay=delay) for found in named.values()]
    rows = [_row(name, found, delay=delay, step=step, small_step=small_step) for name, found in named.items()]
    optimizers = [{**row, "share": share} for row, share in zip(rows, shares, strict=True)]
    points = [
        _row(name, found, delay=delay, step=step, small_step=small_step)
        for pair in pairs
        for name, found in zip(("most stable", "quieter"), pair, strict=True)
    ]
    if as_json:
        print(
            json.dumps(
                {
                    "delay": delay,
                    "step": step,
                    "small_step": small_step,
                    "optimizers": optimizers,
                    "frontier": points,
                }
            )
        )
        return
    columns = ["", "beta", "w", "c", "limit", "noise", "lag"]
    columns += [f"settling at {small_step:g}", f"variance at {step:g}"]
    show_table(
        [*columns, "share"],
        [[*_shown(row), f"{row['share']:.2f}"] for row in optimizers],
        title=f"Momentum as a filter, delay {delay}",
    )
    print()
    show_table(columns, [_shown(row) for row in points], title="Best filters for a lag")


def _row(name: str, found: Point, *, delay: int, step: float, small_step: float) -> dict[str, Any]:
    """A line of the tables. JSON has no infinity: null."""
    from optimizers.theory.filters import settling, weight_variance

    settled = settling(found.filter, delay=delay, step=small_step)
    variance = weight_variance(found.filter, delay=delay, step=step)
    return {
        "name": name,
        **vars(found.filter),
        "limit": found.limit,
        "noise": found.noise,
        "lag": found.lag,
        "settling": settled if settled < float("inf") else None,
        "variance": variance if variance < float("inf") else None,
    }


def _shown(row: Mapping[str, Any]) -> list[str]:
    numbers = [f"{row[key]:.4g}" for key in ("beta", "weight", "coefficient", "limit", "noise", "lag")]
    settled = "unstable" if row["settling"] is None else f"{row['settling']:.0f}"
    variance = "unstable" if row["variance"] is None else f"{row['variance']:.2f}"
    return [row["name"], *numbers, settled, variance]
