"""`asyncpp doctor`: checks this machine or a cluster, with advice on what to change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncpp_cli.base.errors import UserError

if TYPE_CHECKING:
    from asyncpp_cli.doctor.checks import Check
    from asyncpp_cli.sites.profile import Site


def doctor(
    site: Annotated[
        str,
        typer.Option(metavar="NAME", help="Also check this cluster; `local`: only this machine."),
    ] = "local",
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Folder for experiments; default: the current one.")
    ] = Path(),
    job: Annotated[
        bool, typer.Option("--job", help="On a cluster: also run a short job on two nodes.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list of check, ok, detail and advice.")
    ] = False,
) -> None:
    """Check whether runs will work here, and advise.

    Checks torch, GPUs, communication between processes and the folder; with --site also whether sbatch takes
    the profile's jobs.

    Nothing is queued without --job. A `note` is something that runs work without. Exit code 0 if nothing is
    wrong, 1 otherwise.
    """
    from asyncpp_cli.sites.profile import LOCAL, find_site

    chosen = find_site(site)
    if job and chosen.scheduler == LOCAL:
        raise UserError("--job is for clusters: choose one with --site")
    if not folder.is_dir():
        raise UserError(f"--dir {folder}: no such folder")
    checks = list(_checks(chosen, folder, job=job))
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        _show(checks, title=f"doctor: {chosen.name}")
    raise typer.Exit(0 if all(check.ok for check in checks) else 1)


def _checks(site: Site, folder: Path, *, job: bool) -> Iterator[Check]:
    from asyncpp_cli.doctor.checks import machine_checks, submission_check
    from asyncpp_cli.doctor.job import job_checks
    from asyncpp_cli.sites.profile import LOCAL

    yield from machine_checks(folder)
    if site.scheduler != LOCAL:
        found = submission_check(site)
        yield found
        if job and found.ok:
            yield from job_checks(site, folder)


def _show(checks: list[Check], *, title: str) -> None:
    from asyncpp_cli.base.console import show_table
    from asyncpp_cli.base.tables import Fit

    rows = [[check.check, check.verdict, check.detail, check.advice] for check in checks]
    counts = {
        verdict: sum(check.verdict == verdict for check in checks) for verdict in ("ok", "note", "wrong")
    }
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    fit = Fit(fold=["found", "what to change"])
    show_table(["check", "", "found", "what to change"], rows, title=f"{title}: {said}", fit=fit)
