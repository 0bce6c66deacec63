"""A run that pauses at a step and goes on later computes what it computes without the pause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.small_runs import Rows, in_processes, replayed, small_config
from support.training_cases import measured, of_writers

from stages.checkpoint import files
from stages.comm.process import Process
from stages.config.run_config import RunConfig, changed
from stages.config.segments import pauses_exactly
from stages.trainer import replay, train

PAUSE = 3
"""Neither an evaluation nor a checkpoint of the runs here."""


def config_of(schedule: str, **changed: Any) -> RunConfig:
    settings: dict[str, Any] = {"steps": 6, "eval_interval": 4}
    return small_config(schedule, **settings | changed)


def check_goes_on(rows: list[dict[str, Any]], whole: list[dict[str, Any]], *, pause: int) -> None:
    """`rows` of attempts of which the first pause; `whole` of a run without a pause."""
    for kind in ("step", "end"):
        assert of_kind(rows, kind) == of_kind(whole, kind), kind
    assert [row["step"] for row in of_kind(rows, "pause")] == [pause, pause]
    evaluations = of_kind(rows, "eval")
    at_pause = [row for row in evaluations if row["step"] == pause]
    assert len(at_pause) == 2
    assert at_pause[0] == at_pause[1]
    assert [row for row in evaluations if row["step"] != pause] == of_kind(whole, "eval")


def of_kind(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.parametrize(
    ("schedule", "changed"),
    [("1f1b", {"optimizer": "muon"}), ("2bw", {"coefficient": 1.0}), ("zb-v", {}), ("pipedream", {})],
)
@pytest.mark.slow
def test_a_paused_run_goes_on_to_the_same_bits(
    schedule: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    """It pauses twice at the same step, as if it had been killed before it ended."""
    if schedule == "pipedream":
        changed = {"update_interval": 1, "eval_interval": PAUSE}
    config = config_of(schedule, **changed)
    assert pauses_exactly(config, step=PAUSE)
    whole, rows = replayed(config), Rows()
    for until in (PAUSE, PAUSE, None):
        result = replay(config, recorder=rows, checkpoints=tmp_path / "c", until=until)
        assert result.stopped_at is None
        assert files.saved_steps(tmp_path / "c")[0] == (until or config.train.steps)
    if schedule == "pipedream":
        # An evaluation of the whole run, too.
        at_pause = [row for row in measured(rows) if row["kind"] == "eval" and row["step"] == PAUSE]
        expected = [row for row in measured(whole) if row["kind"] == "eval" and row["step"] == PAUSE]
        assert at_pause == 2 * expected
        whole.rows = [row for row in whole.rows if row["kind"] != "eval" or row["step"] != PAUSE]
    check_goes_on(measured(rows), measured(whole), pause=PAUSE)


def paused_twice(process: Process, given: tuple[RunConfig, Path]) -> list[dict[str, Any]]:
    config, folder = given
    rows = Rows()
    for until in (PAUSE, PAUSE, None):
        train(config, process=process, recorder=rows, checkpoints=folder, until=until)
        process.meetings.gather(None)
    return measured(rows)


@pytest.mark.slow
def test_processes_pause_and_go_on_to_the_same_bits(tmp_path: Path) -> None:
    configs = [config_of("1f1b"), config_of("2bw", optimizer="muon")]
    by_rank = in_processes(
        paused_twice, [(config, tmp_path / str(n)) for n, config in enumerate(configs)], size=2
    )
    for config, rows in zip(configs, of_writers(by_rank), strict=True):
        check_goes_on(rows, measured(replayed(config)), pause=PAUSE)


def test_a_pause_where_a_drain_changes_the_numbers() -> None:
    config = config_of("paci")
    assert [step for step in range(1, 7) if pauses_exactly(config, step=step)] == [4, 6]
    config = changed(config, {"train.checkpoint_interval": 3})
    assert [step for step in range(1, 7) if pauses_exactly(config, step=step)] == [3, 4, 6]
