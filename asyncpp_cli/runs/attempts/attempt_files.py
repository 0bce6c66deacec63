"""Reading and validating the JSON files of an attempt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncpp_cli.atomic_files import read_json
from asyncpp_cli.errors import DamagedError
from asyncpp_cli.runs.attempts.early_exits import EARLY_EXITS, parse_early_exits
from asyncpp_cli.runs.attempts.job_record import job_of
from asyncpp_cli.runs.processes import parse_process
from asyncpp_cli.runs.run_folder import FORMAT
from asyncpp_cli.runs.status import Cause

_MOST_PROCESSES = 1_000_000


def read_file(file: Path) -> dict[str, Any] | None:
    """Content of one of an attempt's files, with the fields that its name requires; None if it is missing.

    Raises:
        DamagedError: it cannot be read, or a field is missing or of another type.
    """
    try:
        content = read_json(file, newest_format=FORMAT)
    except FileNotFoundError:
        return None
    kind = file.name.removesuffix(".json")
    if kind.startswith("rank-"):
        kind = f"rank{kind.removeprefix('rank-').lstrip('0123456789')}"
    try:
        if kind in _CHECKS:
            _CHECKS[kind](content)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{file} is damaged ({error!r})") from error
    return content


def _check_attempt(content: Mapping[str, Any]) -> None:
    _check(content, "processes", int)
    if not 0 < content["processes"] <= _MOST_PROCESSES:
        raise ValueError(f"{content['processes']} processes")
    _check(content, "replay", bool)
    for key in ("gpus", "threads"):
        if key in content:  # attempts of earlier versions have none
            _check(content, key, int)
    if content.get("until") is not None:
        _check(content, "until", int)
    _check_time(content, "claimed")
    parse_process(content["by"])
    job_of(content)
    _check({"site": content.get("site", {})}, "site", dict)


def _check_rank(content: Mapping[str, Any]) -> None:
    _check(content, "processes", list)
    for process in content["processes"]:
        parse_process(process)


def _check_end(content: Mapping[str, Any]) -> None:
    for key in ("code", "signal"):
        if content[key] is not None:
            _check(content, key, int)
    _check(content, "stopped", bool)
    _check_time(content, "time")


def _check_error(content: Mapping[str, Any]) -> None:
    _check(content, "message", str)
    _check_time(content, "time")


def _check_energy(content: Mapping[str, Any]) -> None:
    _check(content, "gpu", str)
    if type(content["joules"]) not in (int, float) or not math.isfinite(content["joules"]):
        raise TypeError(f"joules is {content['joules']!r:.60}")


def _check_outcome(content: Mapping[str, Any]) -> None:
    if content.get("last_sign") is not None:
        _check_time(content, "last_sign")


def _check_stop(content: Mapping[str, Any]) -> None:
    _check(content, "reason", str)
    Cause(content.get("cause", Cause.STOPPED))


def _check_refused(content: Mapping[str, Any]) -> None:
    _check(content, "reason", str)


def _check(content: Mapping[str, Any], key: str, kind: type) -> None:
    if type(content[key]) is not kind:
        raise TypeError(f"{key} is {content[key]!r:.60}")


def _check_time(content: Mapping[str, Any], key: str) -> None:
    if type(content[key]) not in (int, float) or not math.isfinite(content[key]):
        raise TypeError(f"{key} is {content[key]!r:.60}")


_CHECKS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "attempt": _check_attempt,
    "rank": _check_rank,
    "rank.end": _check_end,
    "rank.error": _check_error,
    "rank.energy": _check_energy,
    "outcome": _check_outcome,
    "stop": _check_stop,
    "refused": _check_refused,
    EARLY_EXITS: parse_early_exits,
}
