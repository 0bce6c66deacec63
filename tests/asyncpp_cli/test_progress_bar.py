"""A bar on a terminal for what takes longer than a second, and nothing elsewhere."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from threading import Timer

import pytest
from support.command_line import Terminal

from asyncpp_cli.base import progress
from asyncpp_cli.base.console import say
from asyncpp_cli.base.progress import shown


class _Elapsed(Timer):
    """Has waited at once."""

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        super().__init__(0 * seconds, function)

    def start(self) -> None:
        super().start()
        self.join()


def _written(errors: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is written of two steps of four, with a result and a remark in between."""
    monkeypatch.setattr(sys, "stderr", errors)
    with shown("ranks \x1b[2J", total=4) as advance:
        advance(2)
        print("a result")
        say("a remark")
    return errors.getvalue()


def test_a_terminal_shows_how_much_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "Timer", _Elapsed)
    monkeypatch.setenv("COLUMNS", "60")
    text = _written(Terminal(), monkeypatch)
    assert all(part in text for part in ("ranks", "50%", "a remark"))
    assert "\x1b[2J" not in text
    assert "a result" not in text
    assert "a result" in capsys.readouterr().out


def test_what_is_quick_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _written(Terminal(), monkeypatch) == "a remark\n"


def test_a_file_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "Timer", _Elapsed)
    assert _written(io.StringIO(), monkeypatch) == "a remark\n"
