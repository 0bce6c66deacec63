"""A run's `diagnostics` rows, and their values in the second half of the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from asyncpp_cli.report.load.metrics_rows import MetricsRow


@dataclass(frozen=True, kw_only=True)
class DiagnosticsSummary:
    """Medians over the rows of the second half of the run; None where no row has the value."""

    lr_sharpness: float | None
    lr_sharpness_along_update: float | None
    stability_limit: float | None
    update_cosine: float | None
    gradient_cosine: float | None
    diagnostics_seconds: float
    """Of all rows."""


def summary(rows: Sequence[MetricsRow]) -> DiagnosticsSummary | None:
    """The summary of a run's rows, in order; None without any."""
    if not rows:
        return None
    later = [row for row in rows if row["step"] > rows[-1]["step"] / 2]

    def middle(name: str) -> float | None:
        return median(values) if (values := [row[name] for row in later if row[name] is not None]) else None

    return DiagnosticsSummary(
        lr_sharpness=middle("lr_sharpness"),
        lr_sharpness_along_update=middle("lr_sharpness_along_update"),
        stability_limit=middle("limit"),
        update_cosine=middle("update_cosine"),
        gradient_cosine=middle("gradient_cosine"),
        diagnostics_seconds=sum(row["diagnostics_seconds"] for row in rows),
    )


@dataclass(frozen=True, kw_only=True)
class SharpnessCurve:
    """Learning rate times sharpness over the steps of a run, and the limit."""

    steps: list[int]
    values: list[float | None]
    limits: list[float | None]
    along_update: bool
    """Whether the values are those along the update, for an optimizer without others."""


def sharpness_curve(rows: Sequence[MetricsRow]) -> SharpnessCurve | None:
    """The curve of a run's rows; None where no row has a sharpness."""
    for name in ("lr_sharpness", "lr_sharpness_along_update"):
        if any(row[name] is not None for row in rows):
            return SharpnessCurve(
                steps=[row["step"] for row in rows],
                values=[row[name] for row in rows],
                limits=[row["limit"] for row in rows],
                along_update=name != "lr_sharpness",
            )
    return None


def by_step(curves: Iterable[tuple[Sequence[int], Sequence[float | None]]]) -> dict[int, list[float]]:
    """The values that runs have at each step, by step.

    Args:
        curves: Steps and values of each run.
    """
    found: dict[int, list[float]] = {}
    for steps, values in curves:
        for step, value in zip(steps, values, strict=True):
            if value is not None:
                found.setdefault(step, []).append(value)
    return dict(sorted(found.items()))
