"""Pages of benchmarks/results: the rule and the checker."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.results import pages

GOOD = """---
date: 2026-12-01
hardware: 8 x H100
versions: torch 2.13.0, Python 3.11.7
commit: 4f7571b822c8
command: asyncpp sweep good-2026-12-01.yaml --out e && asyncpp launch e
seeds: [0, 1]
data: [good-2026-12-01.csv]
---

# Good
"""


@pytest.mark.parametrize("file", pages.pages(pages.RESULTS), ids=lambda file: file.stem)
def test_every_page_follows_the_rule(file: Path) -> None:
    assert pages.problems(file) == []


def test_the_index_is_current() -> None:
    text = (pages.RESULTS / pages.INDEX).read_text(encoding="utf-8")
    table = pages.index_table(pages.RESULTS)
    assert text == pages.with_index(text, table), "run: python -m benchmarks.results.recompute --write"


def found(folder: Path, text: str, name: str = "good-2026-12-01.md") -> list[str]:
    (folder / "good-2026-12-01.csv").write_text("a\n")
    (folder / name).write_text(text)
    return pages.problems(folder / name)


def test_a_page_with_all_conditions_is_accepted(tmp_path: Path) -> None:
    assert found(tmp_path, GOOD) == []


@pytest.mark.parametrize("field", pages.FIELDS)
def test_a_page_without_a_condition_is_refused(tmp_path: Path, field: str) -> None:
    lines = [line for line in GOOD.splitlines() if not line.startswith(f"{field}:")]
    assert any(f": {field}: missing" in problem for problem in found(tmp_path, "\n".join(lines)))
    empty = "\n".join(f"{field}:" if line.startswith(f"{field}:") else line for line in GOOD.splitlines())
    assert any(f": {field}: missing" in problem for problem in found(tmp_path, empty))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hardware: 8 x H100", "hardware: not recorded", "in pages before 2026-11-23 only"),
        ("commit: 4f7571b822c8", "commit: 4f7571b822c8-dirty", "measure with committed code"),
        ("commit: 4f7571b822c8", "commit: main", "is not a commit"),
        ("date: 2026-12-01", "date: 2026-12-02", "is not that of its name"),
        ("[good-2026-12-01.csv]", "[other.csv]", "other.csv is not in its folder"),
        ("seeds: [0, 1]", "seeds: [0, 1]\nmood: good", "mood: unknown field"),
        ("seeds: [0, 1]", "seeds: [0", "not YAML"),
        ("---\ndate", "date", "does not begin with its conditions"),
        ("# Good", "Good", "has no heading"),
    ],
)
def test_a_page_with_a_fault_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert any(message in problem for problem in found(tmp_path, GOOD.replace(old, new, 1)))


def test_a_page_is_named_by_its_date(tmp_path: Path) -> None:
    assert found(tmp_path, GOOD, name="good.md") == ["good.md: accepted as a name: NAME-YYYY-MM-DD.md"]
