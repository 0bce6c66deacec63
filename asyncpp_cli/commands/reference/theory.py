"""`asyncpp theory`: stability under delay, to compare with runs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from asyncpp_cli.base.console import finite

app = typer.Typer(no_args_is_help=True, help="Stability under delay, without a model.")


class Momentum(StrEnum):
    """Forms of momentum; values of `optimizers.stability.FORMS`."""

    NONE = "none"
    EMA = "ema"
    NESTEROV_EMA = "nesterov-ema"


_TABLE = [("none", 0.0)] + [(form, beta) for form in ("ema", "nesterov-ema") for beta in (0.9, 0.95, 0.99)]


@app.command("stability")
def stability(
    momentum: Annotated[
        Momentum | None, typer.Option(help="Form of momentum; without it, a table of several.")
    ] = None,
    beta: Annotated[float, typer.Option(parser=finite, help="Decay rate of the momentum.")] = 0.9,
    delay: Annotated[int, typer.Option(help="Updates between a gradient's weights and its update.")] = 1,
    coefficient: Annotated[float, typer.Option(parser=finite, help="c of error feedback; 0 for none.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="The limit as JSON.")] = False,
) -> None:
    """Largest stable learning rate times curvature on a quadratic.

    From the characteristic polynomial of the delayed iteration. `ema` is the momentum of Adam, `nesterov-ema`
    that of Muon. The table gives the limit of synchronous training, with the delay, with the delay and error
    feedback of c = 1, and with the best c.
    """
    import json

    from asyncpp_cli.base.console import show_table
    from asyncpp_cli.base.errors import UserError
    from optimizers.stability import best_coefficient, stability_limit

    if momentum is None and as_json:
        raise UserError("--json wants one case: add --momentum none, ema or nesterov-ema")
    try:
        if momentum is not None:
            limit = stability_limit(momentum.value, beta=beta, delay=delay, coefficient=coefficient)
            if as_json:
                case = {"momentum": momentum.value, "beta": beta, "delay": delay, "coefficient": coefficient}
                print(json.dumps({**case, "limit": limit}))
            else:
                print(f"stable up to learning rate x curvature = {limit:.6g}")
            return
        rows = []
        for form, decay in _TABLE:
            limits = [
                stability_limit(form, beta=decay, delay=lag, coefficient=c)
                for lag, c in ((0, 0.0), (delay, 0.0), (delay, 1.0))
            ]
            best, reached = best_coefficient(form, beta=decay, delay=delay)
            shown = [f"{limit:.4g}" for limit in limits]
            rows.append([form, f"{decay:g}", *shown, f"{reached:.4g} at c = {best:.2f}"])
    except ValueError as error:
        raise UserError(str(error)) from None
    show_table(
        ["momentum", "beta", "synchronous", f"delay {delay}", f"delay {delay},\nc = 1", "best c"],
        rows,
        title="Largest stable learning rate x curvature on a quadratic",
    )
