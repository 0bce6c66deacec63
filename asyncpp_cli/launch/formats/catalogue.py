"""The formats of `asyncpp launch --print` by name. Adding one takes a file and a line in `FORMATS`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.launch.formats.described import DescribedRun
from asyncpp_cli.launch.formats.kubernetes import to_kubernetes
from asyncpp_cli.launch.formats.skypilot import to_skypilot
from asyncpp_cli.sites.profile import Site


def _to_text(runs: Sequence[DescribedRun], _site: Site, _retries: int) -> str:
    """Comments and commands, for a shell."""
    lines = []
    for run in runs:
        limits = [f"{run.memory} per node"] if run.memory else []
        limits += [f"at most {run.time}"] if run.time else []
        lines += [f"# {run.id}: {', '.join([str(run.shape), *limits])}", *run.node_commands]
    return "\n".join(lines)


def _to_json(runs: Sequence[DescribedRun], _site: Site, _retries: int) -> str:
    return json.dumps([asdict(run) for run in runs], indent=1)


FORMATS: Mapping[str, Callable[[Sequence[DescribedRun], Site, int], str]] = {
    "commands": _to_text,
    "json": _to_json,
    "kubernetes": to_kubernetes,
    "skypilot": to_skypilot,
}
"""Each takes the runs, the site, and how often a failed run is tried again."""


def printed(name: str, runs: Sequence[DescribedRun], site: Site, *, retries: int | None) -> str:
    """The runs in a format.

    Raises:
        UserError: there is no such format, or the site's profile lacks what it needs.
    """
    if name not in FORMATS:
        raise UserError(f"--print {name}: accepted: {', '.join(FORMATS)}")
    return FORMATS[name](runs, site, site.retries if retries is None else retries)
