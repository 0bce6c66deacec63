"""A report as a page for benchmarks/results, by the rule in its README.md: conditions, then numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from asyncpp_cli.errors import UserError
from asyncpp_cli.report.analysis.conditions import conditions
from asyncpp_cli.report.formats.markdown import to_markdown
from asyncpp_cli.report.formats.records import to_csv
from asyncpp_cli.report.tables.document import Report
from asyncpp_cli.runs.experiment_folder import Experiment

_DATED = re.compile(r"[a-z0-9.-]+-(\d{4}-\d\d-\d\d)")


def to_submission(
    report: Report, experiments: Sequence[Experiment], *, file: Path, hardware: str | None
) -> dict[Path, bytes]:
    """The files of a submission with their content: the page, its CSV, and the templates, the page last.

    Args:
        report: of completed runs.
        experiments: that it reports.
        file: of the page, NAME-YYYY-MM-DD.md.
        hardware: what the runs ran on, in words.

    Raises:
        UserError: a condition that the rule asks for is unknown, or the files would replace others.
    """
    named = _DATED.fullmatch(file.stem)
    if named is None or file.suffix != ".md":
        raise UserError(
            f"--out {file}: accepted: NAME-YYYY-MM-DD.md, a name of lower-case letters, digits and dashes"
        )
    table = file.with_suffix(".csv")
    templates = [
        file.with_name(f"{file.stem}{f'-{number}' if number > 1 else ''}.yaml")
        for number in range(1, len(experiments) + 1)
    ]
    for beside in (table, *templates):
        if beside.exists() and not file.exists():
            raise UserError(f"--out {file}: {beside} exists already; move it, or choose another name")
    header = _conditions(report, hardware=hardware) | {"date": named[1], "data": [table.name]}
    commands = [
        f"asyncpp sweep {template.name} --out e{number} && asyncpp launch e{number}"
        for number, template in enumerate(templates, start=1)
    ]
    header["command"] = "; ".join(commands)
    try:
        contents = {
            template: experiment.template_file.read_bytes()
            for template, experiment in zip(templates, experiments, strict=True)
        }
    except FileNotFoundError as error:
        raise UserError(
            f"{error.filename} is missing: the command that makes the numbers again is unknown"
        ) from None
    order = ("date", "hardware", "versions", "commit", "command", "seeds", "data")
    front = yaml.safe_dump(
        {key: header[key] for key in order}, sort_keys=False, allow_unicode=True, width=120
    )
    page = f"---\n{front}---\n\n{to_markdown(report).removeprefix('#')}"
    return {table: to_csv(report.cells).encode(), **contents, file: page.encode()}


def _conditions(report: Report, *, hardware: str | None) -> dict[str, Any]:
    """The conditions that the runs recorded.

    Raises:
        UserError: one is unknown, or the runs do not agree on it.
    """
    runs = [run for cell in report.cells for run in cell.runs]
    if unfinished := [run.id for run in runs if run.state != "completed"]:
        raise UserError(
            f"a submission has completed runs only, and {len(unfinished)} are not ({unfinished[0]})"
        )
    known = conditions(runs)
    commit = _single(known, "commit")
    if commit.endswith("-dirty"):
        raise UserError(f"the runs are of commit {commit}, with changed files: measure with committed code")
    if hardware is None or not hardware.strip():
        devices = ", ".join(map(str, known["device"])) or "unknown devices"
        raise UserError(f"--hardware TEXT is missing: say what the runs ran on; they recorded {devices}")
    return {
        "hardware": hardware.strip(),
        "versions": f"torch {_single(known, 'torch')}, Python {_single(known, 'python')}",
        "commit": commit,
        "seeds": sorted({int(run.value("seed")) for run in runs}),
    }


def _single(known: Mapping[str, Sequence[Any]], name: str) -> str:
    values = known[name]
    if len(values) != 1:
        problem = f"differ in it ({', '.join(map(str, values))})" if values else "did not record it"
        raise UserError(f"a submission states one {name}, and the runs {problem}")
    return str(values[0])
