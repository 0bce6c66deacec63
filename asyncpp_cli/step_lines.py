"""What a training process prints for who follows its log: where it begins, how far it is, how it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from asyncpp_cli.console import duration

_SECONDS_BETWEEN_LINES = 5.0


class StepLines:
    """Lines on standard output, from the one rank that knows the loss.

    Args:
        steps: of the whole run.
    """

    def __init__(self, *, steps: int) -> None:
        self._steps = steps
        self._began: tuple[float, int] = 0.0, 0
        self._printed: tuple[float, int] | None = None
        """When the last line of a step was, and the tokens until then."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Tell what a row of the metrics is worth telling."""
        match row["kind"]:
            case "start":
                self._began = time.monotonic(), int(row["updates"])
                after = f"going on after step {row['step']}" if row["step"] else "beginning"
                parameters = sum(row["stage_parameters"])
                _print(f"{after} of {self._steps}: {parameters:,} parameters, on {row['device']}")
            case "step":
                self._step(row["step"], tokens=row["tokens"], train_loss=row["train_loss"])
            case "eval":
                _print(f"step {row['step']}: validation loss {row['val_loss']:.4f}")
            case "end":
                _print(f"completed: {self._steps} steps")

    def _step(self, step: int, *, tokens: int, train_loss: float) -> None:
        """Tell how far it is: the first time at once, then now and then."""
        now = time.monotonic()
        figures = ""
        if self._printed is not None:
            then, tokens_then = self._printed
            if now - then < _SECONDS_BETWEEN_LINES:
                return
            began, first = self._began
            left = (now - began) / (step - first) * max(0, self._steps - step)
            figures = f", {(tokens - tokens_then) / (now - then):,.0f} tokens/s, {duration(left)} remaining"
        self._printed = now, tokens
        _print(f"step {step} of {self._steps}: training loss {train_loss:.4f}{figures}")


def _print(line: str) -> None:
    # A closed pipe or a full disk is no reason to stop training.
    with contextlib.suppress(OSError, ValueError):
        print(line, flush=True)
