"""Tables of result pages, and sentences that quote them, say what the raw files say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.results import recompute
from benchmarks.results.pages import conditions_of


@pytest.mark.parametrize("document", recompute.PAGES)
def test_a_document_says_what_its_raw_files_say(document: str) -> None:
    assert recompute.missing(recompute.ROOT / document, recompute.PAGES[document]()) == []


@pytest.mark.parametrize("document", recompute.PAGES)
def test_a_changed_digit_is_found(document: str, tmp_path: Path) -> None:
    expected = list(recompute.PAGES[document]())
    text = (recompute.ROOT / document).read_text(encoding="utf-8")
    piece = next(line for part in expected for line in part.splitlines() if re.search(r"\d\.\d\d", line))
    digit = re.search(r"(?<=\d\.)\d", piece)
    assert digit is not None
    changed = piece[: digit.start()] + str((int(digit[0]) + 1) % 10) + piece[digit.end() :]
    (tmp_path / "page.md").write_text(" ".join(text.split()).replace(" ".join(piece.split()), changed))
    assert recompute.missing(tmp_path / "page.md", iter(expected)) != []


def test_every_page_with_raw_files_is_recomputed() -> None:
    with_raw_files = {
        str(page.relative_to(recompute.ROOT))
        for page in recompute.RESULTS.glob("*-20*.md")
        if isinstance(conditions_of(page.read_text(encoding="utf-8"))["data"], list)
    }
    assert with_raw_files <= recompute.PAGES.keys()
