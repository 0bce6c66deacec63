"""`asyncpp theory`: stability and convergence under delay, to compare with runs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from asyncpp_cli.commands.reference.frontier import frontier
from asyncpp_cli.numbers import finite

app = typer.Typer(no_args_is_help=True, help="Stability and convergence under delay, without a model.")
app.command("frontier")(frontier)


class Momentum(StrEnum):
    """Forms of momentum; values of `optimizers.theory.stability.FORMS`."""

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

    from asyncpp_cli.console import show_table
    from asyncpp_cli.errors import UserError
    from optimizers.theory.stability import best_coefficient, stability_limit

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


@app.command("convergence")
def convergence(
    delay: Annotated[int, typer.Option(min=1, help="Delay of the delayed arms, in updates.")] = 1,
    steps: Annotated[str, typer.Option(help="Run lengths T, with commas between.")] = "128,512,2048",
    as_json: Annotated[bool, typer.Option("--json", help="The norms and rates as JSON.")] = False,
) -> None:
    """How fast delayed Muon converges on a small smooth problem, with and without error feedback.

    Runs the real optimizer and correction for T steps of size 0.5 / sqrt(T), and prints the mean nuclear norm
    of the gradient. It falls like 1 / sqrt(T), a slope of -0.5, where a delay changes the constant and not
    the rate.
    """
    import json

    from asyncpp_cli.console import say, show_table
    from asyncpp_cli.errors import UserError

    try:
        lengths = sorted({int(length) for length in steps.split(",")})
    except ValueError:
        raise UserError(f"--steps is {steps!r}, accepted: whole numbers with commas between") from None
    if len(lengths) < 2 or lengths[0] < 1:
        raise UserError(f"--steps is {steps!r}, accepted: two lengths or more, each at least 1")

    import torch

    from optimizers.theory.convergence import mean_gradient_norm, rate

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are 16 x 24
    arms = {
        "synchronous": (0, 0.0),
        f"delay {delay}": (delay, 0.0),
        f"delay {delay} with error feedback": (delay, 1.0),
    }
    norms: dict[str, list[float]] = {}
    for name, (lag, coefficient) in arms.items():
        say(f"running {name}")
        norms[name] = [mean_gradient_norm(steps=n, delay=lag, coefficient=coefficient) for n in lengths]
    torch.set_num_threads(threads)
    if as_json:
        results = [
            {"arm": name, "steps": lengths, "norms": found, "rate": rate(lengths[-2:], found[-2:])}
            for name, found in norms.items()
        ]
        print(json.dumps(results, indent=2))
        return
    show_table(
        ["arm", *(f"T = {length}" for length in lengths), "slope of the last two"],
        [
            [name, *(f"{norm:.5f}" for norm in found), f"{rate(lengths[-2:], found[-2:]):.3f}"]
            for name, found in norms.items()
        ],
        title="Mean nuclear norm of the gradient over T steps",
    )
