"""Rows of metrics are read as they were written, and a run's numbers are those worked out by hand."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.report_experiment import ExperimentFolder, cells_of, metrics, settings
from support.rows import measured as measure
from support.rows import step_row, typed

from asyncpp_cli.report.load.measure import Measurement
from asyncpp_cli.report.load.metrics_rows import STEP_SCHEMA, Metrics, by_kind, read_metrics
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status
from stages.rows import RowError


def written(folder: Path, text: str) -> Run:
    run = Run(folder)
    run.metrics_file.write_text(text, errors="surrogateescape")
    return run


def lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def assert_same(found: Metrics, expected: Metrics) -> None:
    assert found.steps.equals(expected.steps, null_equal=True)
    # Text: of two losses that are NaN none equals the other.
    texts = [
        repr([each.starts, each.evaluations, each.segments, each.pauses, each.ends, each.torn])
        for each in (found, expected)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("loss", [2.5, math.nan, math.inf, -math.inf])
def test_rows_are_read_as_they_were_written(tmp_path: Path, loss: float) -> None:
    rows = metrics(val_losses=(4.0, loss))
    rows[2] |= {"train_loss": loss, "grad_norm": None, "skipped": True}
    assert [json.loads(typed(row).encoded()) for row in metrics()] == metrics()
    run = written(tmp_path, "".join(f"{typed(row).encoded()}\n" for row in rows))
    found = read_metrics(run)
    assert_same(found, by_kind(map(typed, rows)))
    assert repr(found.steps["train_loss"].to_list()[1:3]) == repr([loss, 4.25])
    assert repr([row.val_loss for row in found.evaluations]) == repr([4.0, loss])
    assert [row.kind for row in run.rows() if row.kind != "step"] == [
        *("start", "segment", "eval", "segment", "eval", "end")
    ]
    assert read_metrics(Run(tmp_path / "none")).is_empty


def test_rows_of_earlier_versions_and_of_other_kinds_are_read(tmp_path: Path) -> None:
    """A kind that is gone is no torn line, and fields that are unknown or missing are no damage."""
    old = {"kind": "start", "step": 0, "device": "cpu", "gone": [1]}
    text = lines([old, {"kind": "diagnostics", "step": 1, "values": {}}, *metrics()[1:2]])
    found = read_metrics(written(tmp_path, text))
    assert (found.torn, len(found.steps), found.starts[0].done) == (0, 1, 0)


def test_a_torn_line_is_counted_wherever_it_is(tmp_path: Path) -> None:
    text = lines(metrics())
    for torn in (
        text[:-20],
        text.replace('{"kind": "step", "step": 2', '{"kind": "st\n{"kind": "step", "step": 2'),
    ):
        found = read_metrics(written(tmp_path, torn))
        assert found.torn == 1
        assert found.steps["step"].to_list() == [1, 2, 3, 4]


@given(st.data())
@pytest.mark.slow
def test_resumed_runs_keep_the_rows_of_the_last_attempt_at_each_step(data: st.DataObject) -> None:
    """Attempts that go on from any step, with rows of any later ones before them."""
    rows: list[dict[str, Any]] = []
    steps: dict[int, float] = {}
    evaluated: dict[int, int] = {}
    done = 0
    for attempt in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, done))
        rows.append({"kind": "start", "step": begin, "updates": begin})
        done = begin + data.draw(st.integers(0, 4))
        steps = {step: loss for step, loss in steps.items() if step <= begin}
        evaluated = {step: of for step, of in evaluated.items() if step <= begin}
        for step in range(begin + 1, done + 1):
            steps[step] = data.draw(st.floats(1, 5))
            rows.append(step_row(step) | {"train_loss": steps[step]})
            if data.draw(st.booleans()):
                evaluated[step] = attempt
                values = {"step": step, "tokens": attempt, "val_loss": 1.0, "seconds": 1.0}
                rows.append({"kind": "eval", **values})
    with tempfile.TemporaryDirectory() as folder:
        found = read_metrics(written(Path(folder), lines(rows)))
    assert dict(found.steps.select("step", "train_loss").iter_rows()) == steps
    assert {row.step: row.tokens for row in found.evaluations} == evaluated


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("step", "x"), ("step", 1.5), ("tokens", None)),
        *(("skipped", 1), ("train_loss", "low"), ("seconds", True)),
    ],
)
def test_a_step_row_of_another_form_is_an_error(tmp_path: Path, name: str, value: Any) -> None:
    rows = metrics()
    rows[1][name] = value
    with pytest.raises(RowError, match="a row of kind step: .*" + name):
        read_metrics(written(tmp_path, lines(rows)))
    del rows[1][name]
    with pytest.raises(RowError, match=f"missing required field `{name}`"):
        read_metrics(written(tmp_path, lines(rows)))


def test_the_columns_are_the_fields_of_a_step_row() -> None:
    assert set(STEP_SCHEMA) == set(metrics()[1]) - {"kind"}


@pytest.mark.parametrize(
    "line",
    [
        *("[" * 100_000, '{"a":' * 100_000, '{"kind": "eval", "step": ' + "9" * 5000 + "}"),
        *(f'{{"kind": {value}}}' for value in ("[]", "{}", "null", "1", "true", "NaN", '["step"]')),
        # Halves of a surrogate pair, and a byte that begins no character.
        *('{"kind": "start", "step": 0, "host": "\\ud800"}', '{"kind": "end", "step": "\\ud800"}'),
        *('{"kind": "end", "\\ud800": 1}', '{"kind": "end\udcff"}', '{"kind": "end", "step": "\udcff"}'),
    ],
)
def test_a_line_that_no_reader_can_parse_is_a_torn_line(line: str, tmp_path: Path) -> None:
    rows = metrics()
    whole = read_metrics(written(tmp_path, lines(rows)))
    found = read_metrics(written(tmp_path, lines(rows) + line + "\n"))
    assert (whole.torn, found.torn) == (0, 1)
    assert_same(replace(found, torn=0), whole)


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
