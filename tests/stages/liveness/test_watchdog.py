"""A process that stands still says where, and ends."""

from __future__ import annotations

import sys
import threading
import time
import types
from pathlib import Path

import pytest
from support.small_runs import Rows, small_config

from stages.config.run_config import changed
from stages.liveness.watchdog import Activity, watching
from stages.model.custom import FactoryError
from stages.rows import Row
from stages.trainer import replay


def test_a_standstill_is_noticed_and_shown(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    began = time.perf_counter()
    with watching(lambda: Activity("training", began, 0.2), on_stall=told.append):
        deadline = began + 5
        while not told and time.perf_counter() < deadline:
            time.sleep(0.01)
    assert told
    assert "nothing new was begun" in told[0]
    assert "test_a_standstill_is_noticed_and_shown" in capfd.readouterr().err

    told.clear()
    with watching(lambda: Activity("training", time.perf_counter(), 0.2), on_stall=told.append):
        time.sleep(0.5)
    assert not told


class Stuck(Rows):
    """Stands still, at a row of some kind or in `flush`, until that is noticed or for some time."""

    def __init__(self, where: str, *, seconds: float) -> None:
        super().__init__()
        self._where = where
        self._seconds = seconds
        self.noticed = threading.Event()
        self.told = ""

    def notice(self, message: str) -> None:
        self.told = message
        self.noticed.set()

    def append(self, row: Row) -> None:
        super().append(row)
        if row.kind == self._where and getattr(row, "step", None) != 1:
            self.noticed.wait(self._seconds)

    def flush(self) -> None:
        if self._where == "flush":
            self.noticed.wait(self._seconds)


@pytest.mark.parametrize(
    ("where", "doing", "function"),
    [
        ("step", "training", "in append"),
        ("eval", "evaluating", "in append"),
        ("flush", "writing a checkpoint", "in flush"),
        ("end", "ending", "in append"),
    ],
)
def test_a_run_that_stands_still_is_noticed(
    where: str, doing: str, function: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # On a busy machine something else may stand still for so short a time: then for longer.
    for factor in (1, 5, 25):
        config, rows = small_config("2bw"), Stuck(where, seconds=60)
        config = changed(config, {"site.timeout": 0.3 * factor, "site.save_timeout": 0.5 * factor})
        replay(config, recorder=rows, checkpoints=tmp_path / f"c{factor}", on_stall=rows.notice)
        stacks = capfd.readouterr().err
        if f"while {doing}; " in rows.told and function in stacks:
            break
    assert f"while {doing}; " in rows.told
    assert function in stacks


@pytest.mark.slow
def test_a_factory_that_loops_at_import_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "looping_model.py").write_text("import sys\nwhile not sys.modules['told'].messages: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    told = types.ModuleType("told")
    told.messages = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "told", told)
    config = small_config("2bw")
    # A start counts as stalled after twice the larger of both.
    short = {"site.timeout": 0.3, "site.start_timeout": 0.05}
    config = changed(config, short | {"model.factory": "looping_model:make"})
    with pytest.raises(FactoryError):
        replay(config, recorder=Rows(), on_stall=told.messages.append)
    assert "while building the model; " in told.messages[0]
    assert "looping_model.py" in capfd.readouterr().err


def test_a_slow_disk_is_no_standstill(tmp_path: Path) -> None:
    config, rows = small_config("2bw"), Stuck("flush", seconds=1.5)
    config = changed(config, {"site.timeout": 0.3, "site.save_timeout": 60.0})
    replay(config, recorder=rows, checkpoints=tmp_path / "c", on_stall=rows.notice)
    assert not rows.told
