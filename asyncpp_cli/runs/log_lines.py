"""Lines that a training process prints to its log: start, progress, end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from asyncpp_cli.base.console import duration

_SECONDS_BETWEEN_LINES = 5.0


class StepLines:
    """Prints progress lines on standard output, on the one rank that has the loss.

    Args:
        steps: steps of the whole run.
    """

    def __init__(self, *, steps: int) -> None:
        self._steps = steps
        self._began: tuple[float, int] = 0.0, 0
        self._tokens_per_step = 1
        self._replayed = False
        self._printed: tuple[float, int] | None = None
        """Time of the last step line, and tokens trained until then."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Print a line for a metrics row, if it calls for one."""
        match row["kind"]:
            case "start":
                self._began = time.monotonic(), int(row["step"])
                self._tokens_per_step, self._replayed = (
                    int(row["tokens_per_step"]),
                    row.get("replayed", False),
                )
                after = f"resuming after step {row['step']}" if row["step"] else "beginning"
                count, active = row["parameters"], row["active_parameters"]
                parameters = f"{count:,} parameters" + (f" ({active:,} active)" if active < count else "")
                _print(f"{after} of {self._steps}: {parameters}, on {row['device']}")
            case "step":
                # Some schedules have several updates per step.
                step = row["tokens"] // self._tokens_per_step
                self._step(step, tokens=row["tokens"], train_loss=row["train_loss"])
            case "eval":
                _print(f"step {row['step']}: validation loss {row['val_loss']:.4f}")
            case "end":
                _print(f"completed: {self._steps} steps")
            case "pause":
                _print(f"paused after step {row['step']} of {self._steps}")

    def _step(self, step: int, *, tokens: int, train_loss: float) -> None:
        """Print a step line, at most one every few seconds."""
        now = time.monotonic()
        figures = ""
        if self._printed is not None:
            last, last_tokens = self._printed
            if now - last < _SECONDS_BETWEEN_LINES:
                return
            began, first = self._began
            remaining = (now - began) / max(1, step - first) * (self._steps - step)
            rate = f", {(tokens - last_tokens) / (now - last):,.0f} tokens/s" if not self._replayed else ""
            figures = f"{rate}, {duration(remaining)} remaining"
        self._printed = now, tokens
        _print(f"step {step} of {self._steps}: training loss {train_loss:.4f}{figures}")


def _print(line: str) -> None:
    # A closed pipe or a full disk must not stop training.
    with contextlib.suppress(OSError, ValueError):
        print(line, flush=True)
