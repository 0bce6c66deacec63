"""One run's rows against values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.report_experiment import ExperimentFolder, cells_of, metrics, settings

from asyncpp_cli.report.load.measure import Measurement
from asyncpp_cli.report.load.measure import measure as measure_metrics
from asyncpp_cli.report.load.metrics_rows import from_rows
from asyncpp_cli.runs.status import State, Status


def measure(rows: Sequence[Mapping[str, Any]]) -> Measurement:
    return measure_metrics(from_rows(rows))


def test_bits_per_byte_counts_the_bytes_of_a_token() -> None:
    rows = metrics(val_losses=(4.0, 2 * math.log(2)))
    assert measure(rows).bits_per_byte == pytest.approx(2.0, rel=1e-15)
    rows[0]["bytes_per_token"] = 4.0
    assert measure(rows).bits_per_byte == pytest.approx(0.5, rel=1e-15)


def test_delay_is_the_largest_of_all_stages_and_segments() -> None:
    rows = metrics(delay=1)
    assert measure(rows).delay == 1
    [first, second] = [row for row in rows if row["kind"] == "segment"]
    first["delay_max"] = [3, 0]
    second["delay_max"] = [1, 2]
    assert measure(rows).delay == 3


def test_skipped_steps_are_counted() -> None:
    rows = metrics()
    rows[1]["skipped"] = True
    assert measure(rows).skipped_steps == 1


def test_a_run_that_has_just_begun_has_no_numbers() -> None:
    measured = measure(metrics()[:1])
    assert (measured.val_loss, measured.tokens_per_second, measured.delay, measured.bubble) == (None,) * 4
    assert measured.unigram_bits_per_byte == 4.83
    assert measure([]) == Measurement()


def test_memory_is_the_largest_of_the_segments_and_the_devices_where_they_count_it() -> None:
    rows = metrics()
    assert measure(rows).peak_memory == ()
    [first, second] = [row for row in rows if row["kind"] == "segment"]
    first["memory"] = {"weights": [1, 1], "total": [10, 40], "device_peak": []}
    second["memory"] = {"weights": [1, 1], "total": [30, 20], "device_peak": []}
    assert measure(rows).peak_memory == (30, 40)
    first["memory"]["device_peak"] = second["memory"]["device_peak"] = [50, 60]
    assert measure(rows).peak_memory == (50, 60)


def test_a_segment_in_which_a_rank_was_not_timed_has_no_bubble() -> None:
    rows = metrics(steady=((1000, 2.0), (0, 1.0)), busy=((0.5, 0.75), (0.5, 0.5)))
    [_, second] = [row for row in rows if row["kind"] == "segment"]
    second["busy"] = [None, None]
    assert measure(rows).bubble_by_rank == (0.5, 0.25)


def test_going_on_after_a_pause_is_no_restart(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "e")
    rows = metrics(
        val_losses=(4.0, 3.5, 3.0), steady=((1000, 2.0),) * 3, busy=((0.5, 0.5),) * 3, evaluated=(2, 3, 4)
    )
    at = [rows.index(row) + 1 for row in rows if row["kind"] == "eval"]

    def attempt(number: int, step: int) -> dict[str, Any]:
        return {**rows[0], "attempt": number, "step": step}

    def pause(step: int) -> dict[str, Any]:
        return {"kind": "pause", "step": step, "seconds": 1.0}

    # It was killed as it paused at step 2, and once more after step 3.
    paused_at_2 = [*rows[: at[0]], pause(2), attempt(2, 2), pause(2)]
    paused_at_3 = [*paused_at_2, attempt(3, 2), *rows[at[0] : at[1]], pause(3)]
    ended = [*paused_at_3, attempt(4, 3), attempt(5, 3), *rows[at[1] :]]
    completed = Status(state=State.COMPLETED, attempt=5, step=4, steps=4)
    paused = Status(state=State.PAUSED, attempt=3, step=3, steps=4)
    experiment.add(settings("1f1b", "muon"), rows=ended, status=completed)
    experiment.add(settings("2bw", "muon"), rows=paused_at_3, status=paused)
    assert [cell["restarts"] for cell in cells_of(experiment.folder)] == [2, 1]
