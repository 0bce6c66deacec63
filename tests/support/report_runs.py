"""Results of runs as the report loads them, without files."""

from __future__ import annotations

from typing import Any

from support.report_experiment import settings

from asyncpp_cli.report.load.measure import Measurement
from asyncpp_cli.report.load.run import RunResult


def run(
    schedule: str, optimizer: str = "muon", *args: Any, loss: float | None = 3.0, **further: Any
) -> RunResult:
    state = further.pop("state", "completed")
    speed = further.pop("speed", 1000.0)
    axes = further.pop("axes", {})
    config = settings(schedule, optimizer, *args, **further)
    return RunResult(
        id=f"{schedule}-{config['seed']}",
        axes=axes,
        config=config,
        state=state,
        measurement=Measurement(val_loss=loss, tokens_per_second=speed),
    )
