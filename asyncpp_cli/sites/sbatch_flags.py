"""The sbatch flags that a site profile may add: what their values look like, and which have a key instead.

sbatch reads a number up to its first character that is no digit (`--nice=1e3` is 1), and a time of 99 minutes
as one, so values of flags that are known are checked before they are written into a script.
"""

from __future__ import annotations

import re
from typing import NamedTuple

SET_BY_ASYNCPP = (
    *("array", "chdir", "job-name", "nodes", "ntasks", "output", "error", "parsable", "wrap"),
    *("clusters", "quiet", "test-only", "wait"),
)
"""Flags that asyncpp sets itself, or by whose answer it would lose a job; a profile must not."""

KEYS = {
    **{name: name for name in ("partition", "account", "qos", "constraint", "exclude", "time")},
    "mem": "memory",
    "signal": "signal_lead",
    "cpus-per-task": "cpus_per_task",
    "ntasks-per-node": "tasks_per_node",
}
"""Flags whose value a key of the profile holds, with that key."""

TIME = r"(\d{1,7}|\d{1,7}:[0-5]?\d|\d{1,5}:[0-5]?\d:[0-5]?\d|\d{1,5}-\d{1,5}(:[0-5]?\d){0,2})"
MEMORY = r"\d+[KMGT]?"


class _Kind(NamedTuple):
    """What the value of a flag looks like."""

    pattern: str
    description: str
    bare: bool = False
    """Whether the flag may stand without a value."""
    is_number: bool = False
    """Whether YAML's numbers are meant, so that `1e3` is a thousand; otherwise it is what was written."""


_COUNT = _Kind(r"\d+", "a whole number >= 0", is_number=True)
_NO_VALUE = _Kind(r"(?!)", "true", bare=True)
_TIME = _Kind(TIME, "'MINUTES', 'HH:MM:SS', 'D-HH:MM:SS'")
_MEMORY = _Kind(MEMORY, "an amount of memory: 64G, 900M")
_OF_A_TYPE = _Kind(r"([A-Za-z]\w*:)?\d+", "a number, or TYPE:NUMBER", is_number=True)

_KINDS = {
    "nice": _Kind(r"-?\d+", "a whole number, or true", bare=True, is_number=True),
    "priority": _Kind(r"\d+|TOP", "a whole number >= 0, or TOP", is_number=True),
    **dict.fromkeys(
        (
            *("core-spec", "thread-spec", "cores-per-socket", "sockets-per-node", "threads-per-core"),
            *("cpus-per-gpu", "mincpus", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket"),
        ),
        _COUNT,
    ),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"), _OF_A_TYPE),
    **dict.fromkeys(("time-min", "delay-boot"), _TIME),
    **dict.fromkeys(("mem-per-cpu", "mem-per-gpu", "tmp"), _MEMORY),
    **dict.fromkeys(
        (
            *("contiguous", "hold", "overcommit", "oversubscribe", "reboot", "requeue", "no-requeue"),
            *("spread-job", "use-min-nodes"),
        ),
        _NO_VALUE,
    ),
    "exclusive": _Kind("user|mcs|topo", "true, user, mcs, topo", bare=True),
    "open-mode": _Kind("append|truncate", "append, truncate"),
    "kill-on-invalid-dep": _Kind("yes|no", "'yes', 'no'"),
    "switches": _Kind(rf"\d+(@{TIME})?", "a number, or NUMBER@TIME"),
}
"""By flag; values of others are text that asyncpp does not know."""


def is_number(name: str) -> bool:
    """Whether a flag's value is read as a number of YAML; otherwise it is the text in the file."""
    return name in _KINDS and _KINDS[name].is_number


def flag_value(name: str, value: object) -> object:
    """The value of a flag as sbatch takes it; True: the flag stands without one.

    Raises:
        ValueError: it is not one; the message says what is accepted.
    """
    kind = _KINDS.get(name)
    if kind is None:
        is_text = isinstance(value, int | float | str) and value is not False
        if not is_text or re.search(r"[\x00-\x1f]", str(value)):
            raise ValueError("text, a number or true")
        return value
    if value is True and kind.bare:
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(kind.pattern, text):
        raise ValueError(kind.description)
    return text
