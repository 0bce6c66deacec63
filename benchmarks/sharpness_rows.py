"""Learning rate times sharpness along runs, beside the limit of each arm.

    python benchmarks/sharpness_rows.py EXPERIMENT... [--csv FILE]

The runs have `train.diagnostics`, and need not be complete. Prints for each arm its medians over the rows of
the second half of the steps that it has, and the median share of the limit at each step. The CSV has every
row.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from asyncpp_cli.report.formats.records import csv_text
from asyncpp_cli.report.load.experiments import Loader
from asyncpp_cli.report.load.run import RunResult
from asyncpp_cli.runs.experiment_folder import open_experiment

ARM = ("schedule", "optimizer", "error_feedback", "optimizer.lr")
FIELDS = (
    *("step", "lr", "limit", "lr_sharpness", "residual", "lr_sharpness_along_update"),
    *("update_cosine", "gradient_cosine", "diagnostics_seconds"),
)


def rows_of(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """The diagnostics of runs, each row with its arm, seed and validation loss."""
    rows = []
    for run in runs:
        losses = {evaluation.step: evaluation.val_loss for evaluation in run.measurement.evaluations}
        of_run = {key: run.value(key) for key in (*ARM, "seed")}
        rows += [
            {**of_run, **{name: row[name] for name in FIELDS}, "val_loss": losses[row["step"]]}
            for row in run.measurement.diagnostics
        ]
    return rows


def arm_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line of Markdown for each arm."""
    lines = [
        "| schedule | optimizer | EF | lr | seeds | steps | limit | lr x sharpness | of the limit "
        "| along the update | update cosine | gradient cosine | val loss |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(tuple(row[key] for key in ARM) for row in rows):
        own = [row for row in rows if tuple(row[key] for key in ARM) == arm]
        last = max(row["step"] for row in own)
        later = [row for row in own if row["step"] > last / 2]
        ends = [row["val_loss"] for row in own if row["step"] == last]
        limit, sharpness = _middle(later, "limit"), _middle(later, "lr_sharpness")
        share = sharpness / limit if limit and sharpness is not None else None
        numbers = [limit, sharpness, share, _middle(later, "lr_sharpness_along_update")]
        numbers += [_middle(later, name) for name in ("update_cosine", "gradient_cosine")]
        seeds = len({row["seed"] for row in own})
        shown = ["-" if number is None else f"{number:.3g}" for number in numbers]
        loss = f"{sum(ends) / len(ends):.3f}" if ends else "-"
        lines.append("| " + " | ".join(map(str, (*arm, seeds, last, *shown, loss))) + " |")
    return lines


def share_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Sharpness over the limit at each step, the median of the seeds: a line of Markdown for each arm."""
    known = [row for row in rows if row["limit"] is not None and row["lr_sharpness"] is not None]
    steps = sorted({row["step"] for row in known})
    lines = [
        "| schedule | optimizer | EF | lr | limit | " + " | ".join(map(str, steps)) + " |",
        "|" + "---|" * (len(steps) + 5),
    ]
    for arm in dict.fromkeys(tuple(row[key] for key in ARM) for row in known):
        own = [row for row in known if tuple(row[key] for key in ARM) == arm]
        shares: dict[int, list[float]] = {}
        for row in own:
            shares.setdefault(row["step"], []).append(row["lr_sharpness"] / row["limit"])
        cells = [f"{median(shares[step]):.2f}" if step in shares else "" for step in steps]
        lines.append("| " + " | ".join(map(str, (*arm, f"{own[-1]['limit']:.3g}", *cells))) + " |")
    return lines


def _middle(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    return median(values) if (values := [row[name] for row in rows if row[name] is not None]) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiments", nargs="+", type=Path)
    parser.add_argument("--csv", type=Path, help="file for every row")
    given = parser.parse_args()
    runs, remarks = Loader(keep_steps=False).load([open_experiment(folder) for folder in given.experiments])
    rows = rows_of(runs)
    print("\n".join([*arm_table(rows), "", *share_table(rows), *remarks]))
    if given.csv is not None and rows:
        given.csv.write_text(csv_text([list(rows[0]), *(list(row.values()) for row in rows)]))


if __name__ == "__main__":
    main()
