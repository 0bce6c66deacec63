"""`asyncpp doctor`: is this machine, or this cluster, fit for it? And if not, what to change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.errors import UserError

if TYPE_CHECKING:
    from asyncpp_cli.cluster.sites import Site
    from asyncpp_cli.doctor.checks import Check


def doctor(
    site: Annotated[
        str,
        typer.Option("--site", metavar="NAME", help="Look at this cluster too; `local`: this machine alone."),
    ] = "local",
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where experiments are to lie; without: here.")
    ] = Path(),
    job: Annotated[
        bool,
        typer.Option("--job", help="On a cluster: also run a short job, to see whether two nodes meet."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A list of check, ok, detail and advice, on standard output.")
    ] = False,
) -> None:
    """Check what runs need, and say what to change: Python, torch, GPUs, processes that talk to each other, a
    compiler, the folder; with --site also what the cluster has and allows, beside the site's profile.

    Nothing is queued without --job. A `note` is something that runs can do without. Exit code 0 if nothing
    is wrong, 1 otherwise.
    """
    from asyncpp_cli.cluster.sites import LOCAL, find_site

    chosen = find_site(site)
    if job and chosen.scheduler == LOCAL:
        raise UserError("--job is for clusters: name one by --site")
    if not folder.is_dir():
        raise UserError(f"--dir {folder}: there is no such folder")
    checks = list(_checks(chosen, folder, job=job))
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        _show(checks, title=f"doctor: {chosen.name}")
    raise typer.Exit(0 if all(check.ok for check in checks) else 1)


def _checks(site: Site, folder: Path, *, job: bool) -> Iterator[Check]:
    from asyncpp_cli.cluster.sites import LOCAL
    from asyncpp_cli.doctor.cluster import cluster_checks
    from asyncpp_cli.doctor.job import job_checks
    from asyncpp_cli.doctor.machine import machine_checks

    yield from machine_checks(folder)
    if site.scheduler != LOCAL:
        found = list(cluster_checks(site, folder))
        yield from found
        if job and all(check.ok for check in found):
            yield from job_checks(site, folder)


def _show(checks: list[Check], *, title: str) -> None:
    from asyncpp_cli.console import show_table

    rows = [[check.check, check.word, check.detail, check.advice] for check in checks]
    counts = {word: sum(check.word == word for check in checks) for word in ("ok", "note", "wrong")}
    said = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    show_table(["check", "", "found", "what to change"], rows, title=f"{title}: {said}")
