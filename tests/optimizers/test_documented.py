"""The tables of docs/optimizers.md say what the optimizers declare."""

from __future__ import annotations

import re
from pathlib import Path

import optimizers

TEXT = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, its head first."""
    section = TEXT.partition(f"## {heading}\n")[2]
    rows = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    assert rows is not None
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[0].splitlines()]


def named(cell: str) -> list[str]:
    return re.findall(r"`([\w-]+)`", cell)


def test_memory() -> None:
    _, _, *rows = table("Memory")
    documented = {name: (formula, size) for names, formula, size in rows for name in named(names)}
    declared = {}
    for name, method in optimizers.METHODS.items():
        formula = method.matrix_state.replace("rows", "r").replace("columns", "c").replace("^2", "²")
        declared[name] = (formula, f"{method.state_bytes_per_parameter:g}")
    assert documented == declared


def test_which_parameters_go_to_which_rule() -> None:
    head, _, *rows = table("Which parameter goes to which rule")
    columns = {name: column for column, cell in enumerate(head) for name in named(cell)}
    rest = head.index("the others")
    words = {"AdamW": "adamw", "spectral steps": "scion-spectral", "sign steps": "scion-sign"}
    for name, method in optimizers.METHODS.items():
        documented = [row[columns.get(name, rest)] for row in rows]
        assert [words.get(rule, name) for rule in documented] == [
            method.rules[role] for role in ("matrix", "embedding", "head", "router", "vector")
        ]


def test_every_optimizer_and_correction_has_its_source() -> None:
    sources = TEXT.partition("## Sources\n")[2]
    entries = [*optimizers.METHODS.values(), *optimizers.CORRECTIONS.values()]
    papers = {paper for entry in entries for paper in re.findall(r"\d{4}\.\d{5}", entry.reference)}
    assert papers <= set(re.findall(r"\d{4}\.\d{5}", sources))
