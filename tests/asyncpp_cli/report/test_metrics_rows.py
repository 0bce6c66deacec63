"""Metrics read fast are those read as any JSON, and a run's numbers those worked out by hand."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.report_experiment import ExperimentFolder, cells_of, metrics, settings

from asyncpp_cli.report.load import metrics_rows as rows_module
from asyncpp_cli.report.load.measure import Measurement
from asyncpp_cli.report.load.measure import measure as measure_metrics
from asyncpp_cli.report.load.metrics_rows import STEP_SCHEMA, Metrics, from_rows, read_metrics
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status


def written(folder: Path, text: str) -> Run:
    run = Run(folder)
    run.metrics_file.write_text(text)
    return run


def lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def assert_same(found: Metrics, expected: Metrics) -> None:
    assert found.steps.equals(expected.steps, null_equal=True)
    # Text: of two losses that are NaN none equals the other.
    assert (repr(found.others), found.torn) == (repr(expected.others), expected.torn)


def read_slowly(run: Run) -> Metrics:
    rows, torn = run.metrics_and_torn_lines()
    return from_rows(rows, torn=torn)


@pytest.fixture
def only_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow way is an error."""

    def never(*_: Any, **__: Any) -> Metrics:
        raise AssertionError("read slowly")

    monkeypatch.setattr(rows_module, "from_rows", never)


@pytest.mark.usefixtures("only_fast")
@pytest.mark.parametrize("loss", [2.5, math.nan, math.inf, -math.inf])
def test_a_whole_file_is_read_fast(tmp_path: Path, loss: float) -> None:
    rows = metrics(val_losses=(4.0, loss))
    rows[2] |= {"train_loss": loss, "grad_norm": None, "skipped": True}
    run = written(tmp_path, lines(rows))
    found = read_metrics(run)
    assert_same(found, read_slowly(run))
    assert found.steps["step"].to_list() == [1, 2, 3, 4]
    assert [row["kind"] for row in found.others] == ["start", "segment", "eval", "segment", "eval", "end"]
    without_steps = written(tmp_path, lines(rows[:1]))
    assert_same(read_metrics(without_steps), read_slowly(without_steps))
    assert read_metrics(Run(tmp_path / "none")).others == ()


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
def test_resumed_runs_lose_the_same_rows_either_way(data: st.DataObject) -> None:
    """Attempts that go on from any step, with rows of any later ones before them."""
    rows: list[dict[str, Any]] = []
    done = 0
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, done))
        rows.append({"kind": "start", "step": begin, "updates": begin})
        done = begin + data.draw(st.integers(0, 4))
        for step in range(begin + 1, done + 1):
            rows.append(dict(metrics()[1]) | {"step": step, "train_loss": data.draw(st.floats(1, 5))})
            if data.draw(st.booleans()):
                rows.append({"kind": "eval", "step": step, "tokens": step, "val_loss": 1.0, "seconds": 1.0})
    with tempfile.TemporaryDirectory() as folder:
        run = written(Path(folder), lines(rows))
        expected = read_slowly(run)
        assert_same(rows_module._read_fast(run.metrics_file.read_bytes()), expected)


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
    with pytest.raises((TypeError, ValueError)):
        read_metrics(written(tmp_path, lines(rows)))
    del rows[1][name]
    with pytest.raises((KeyError, ValueError)):
        read_metrics(written(tmp_path, lines(rows)))


def test_the_columns_are_the_fields_of_a_step_row() -> None:
    assert set(STEP_SCHEMA) == set(metrics()[1]) - {"kind"}


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"a":' * 100_000, '{"kind": "eval", "step": ' + "9" * 5000 + "}"]
)
def test_a_line_that_no_reader_can_parse_is_a_torn_line(line: str, tmp_path: Path) -> None:
    rows = metrics()
    whole = read_metrics(written(tmp_path, lines(rows)))
    found = read_metrics(written(tmp_path, lines(rows) + line + "\n"))
    assert (whole.torn, found.torn) == (0, 1)
    assert_same(Metrics(steps=found.steps, others=found.others), whole)


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
