"""Tuning every arm of a template with the same budget, as `asyncpp tune` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncpp_cli.base.errors import INTERRUPTED
from asyncpp_cli.launch.common.options import LaunchOptions

if TYPE_CHECKING:
    from asyncpp.experiment import Experiment


def tune(
    template: str | Path,
    *changes: str | Mapping[str, Any],
    over: Mapping[str, str | Sequence[Any]],
    out: str | Path,
    samples: int = 8,
    search_seed: int | None = None,
    eta: int = 2,
    rungs: Sequence[float] = (0.125, 0.25),
    allow_code: str | Sequence[str] = (),
    **launching: Any,
) -> Experiment:
    """Tune every arm of a template, or go on with a tuning in `out`, as `asyncpp tune`.

    Args:
        template: name of a shipped template, or a file.
        changes: settings for all cells, as in `"train.steps=300"` or `{"train.steps": 300}`.
        over: `"LOW:HIGH"`, `"LOW:HIGH:log"` or a list of values, by key.
        out: the experiment's folder.
        samples: values of each range or, with `search_seed`, points in all.
        search_seed: draws the points at random; None: a grid of points.
        eta: one in `eta` candidates goes on from a rung.
        rungs: shares of all steps after which candidates are compared; empty: train every one to the end.
        allow_code: modules of your own that the template may name, as `--allow-code`.
        **launching: `site`, `replay`, `max_parallel`, `retries`, `quiet`: as in `Experiment.launch`.

    Raises:
        UserError: an argument is not accepted, or the folder holds another tuning.
        KeyboardInterrupt: after Ctrl-C; the runs started here have saved.
    """
    import json

    from asyncpp.experiment import Experiment, change_texts
    from asyncpp_cli.tune.plan import Question
    from asyncpp_cli.tune.tuning import go_on, write_tuning

    texts = [
        f"{key}={value if isinstance(value, str) else json.dumps(list(value))}" for key, value in over.items()
    ]
    question = Question(
        template=str(template),
        changes=tuple(change_texts(changes)),
        over=tuple(texts),
        samples=samples,
        search_seed=search_seed,
        eta=eta,
        rungs=tuple(rungs),
    )
    write_tuning(question, out=Path(out), allow_code=allow_code)
    if go_on(Path(out), LaunchOptions(**launching)) == INTERRUPTED:
        raise KeyboardInterrupt
    return Experiment(out)
