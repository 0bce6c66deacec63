"""Checks the pages of this folder, and writes their index into README.md.

A page begins with its conditions between two lines `---`, as YAML; README.md has the rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

RESULTS = Path(__file__).resolve().parent
INDEX = "README.md"
BEGIN, END = "<!-- index: begin -->", "<!-- index: end -->"

FIELDS = ("date", "hardware", "versions", "commit", "command", "seeds", "data")
UNKNOWN = "not recorded"
RULE_SINCE = "2026-11-23"
"""Pages of earlier dates may say that a condition was not recorded."""

_DATED = re.compile(r"[a-z0-9.-]+-(\d{4}-\d\d-\d\d)\.md")
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_CONDITIONS = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_HEADING = re.compile(r"^# (.+)$", re.MULTILINE)


def problems(file: Path) -> list[str]:
    """What a page lacks, each as a sentence that names the file and the field."""
    named = _DATED.fullmatch(file.name)
    if named is None:
        return [f"{file.name}: accepted as a name: NAME-YYYY-MM-DD.md"]
    text = file.read_text(encoding="utf-8")
    try:
        conditions = conditions_of(text)
    except ValueError as error:
        return [f"{file.name}: {error}"]
    found = [] if _HEADING.search(text) else [f"{file.name}: it has no heading `# ...`"]
    found += [
        f"{file.name}: {field}: missing; benchmarks/results/README.md says what it is"
        for field in FIELDS
        if not str(conditions.get(field) or "").strip()
    ]
    found += [f"{file.name}: {field}: unknown field" for field in conditions if field not in FIELDS]
    if str(conditions.get("date")) != named[1]:
        found.append(f"{file.name}: date: {conditions.get('date')} is not that of its name")
    if named[1] >= RULE_SINCE:
        found += [
            f"{file.name}: {field}: {UNKNOWN!r} is accepted in pages before {RULE_SINCE} only"
            for field in FIELDS
            if str(conditions.get(field)) == UNKNOWN
        ]
    commit = str(conditions.get("commit") or UNKNOWN)
    if commit.endswith("-dirty"):
        found.append(f"{file.name}: commit: {commit}: measure with committed code")
    elif commit != UNKNOWN and not _COMMIT.fullmatch(commit):
        found.append(f"{file.name}: commit: {commit!r} is not a commit; accepted: 7 to 40 hexadecimal digits")
    data = conditions.get("data")
    for name in data if isinstance(data, list) else []:
        if not (file.parent / str(name)).is_file():
            found.append(f"{file.name}: data: {name} is not in its folder")
    return found


def conditions_of(text: str) -> Mapping[str, Any]:
    """The conditions that a page begins with.

    Raises:
        ValueError: it has none, or they are not YAML.
    """
    block = _CONDITIONS.match(text)
    if block is None:
        raise ValueError("it does not begin with its conditions between two lines `---`")
    try:
        conditions = yaml.safe_load(block[1])
    except yaml.YAMLError as error:
        raise ValueError(f"its conditions are not YAML ({str(error).splitlines()[0]})") from error
    if not isinstance(conditions, dict):
        raise ValueError("its conditions are no mapping of fields")
    return conditions


def pages(folder: Path) -> list[Path]:
    """The pages of a folder, the newest first."""
    files = [file for file in folder.glob("*.md") if file.name != INDEX]
    return sorted(sorted(files), key=lambda file: file.stem[-10:], reverse=True)


def index_table(folder: Path) -> str:
    """A row for each page: its heading, date, hardware, commit and data."""
    lines = ["| result | date | hardware | commit | data |", "|---|---|---|---|---|"]
    for file in pages(folder):
        text = file.read_text(encoding="utf-8")
        conditions = conditions_of(text)
        heading = _HEADING.search(text)
        title = re.sub(r",? \d{4}-\d\d-\d\d$", "", heading[1]) if heading else file.stem
        data = conditions["data"]
        linked = ", ".join(f"[{name}]({name})" for name in data) if isinstance(data, list) else str(data)
        cells = [f"[{title}]({file.name})", conditions["date"], conditions["hardware"], conditions["commit"]]
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in [*cells, linked]) + " |")
    return "\n".join(lines)


def with_index(text: str, table: str) -> str:
    """The text of README.md with this index."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def faults(*, write: bool) -> list[str]:
    """What is wrong with the pages or their index; `write`: the index is renewed."""
    found = [problem for file in pages(RESULTS) for problem in problems(file)]
    if found:
        return found
    readme = RESULTS / INDEX
    text = readme.read_text(encoding="utf-8")
    current = with_index(text, index_table(RESULTS))
    if write:
        readme.write_text(current, encoding="utf-8")
    elif text != current:
        return ["the index is not current: python -m benchmarks.results.recompute --write"]
    return []
