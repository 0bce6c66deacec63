"""The formats of a report by name. Adding one takes a line in `FORMATS`; its writer is imported on use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a report is written."""

    writer: str
    """`module:function`, in this folder: from the report and its options to the text."""
    needs_file: bool = False
    """It is written to a file alone."""
    keeps_steps: bool = False
    """It shows every step of the runs."""
    options: tuple[str, ...] = ()
    """Options that this format alone takes."""

    def text(self, report: Any, options: Any) -> str:
        """The report, a `tables.document.Report`, with its `formats.options.ReportOptions`."""
        module, _, function = self.writer.partition(":")
        text: str = getattr(import_module(f"{__package__}.{module}"), function)(report, options)
        return text


FORMATS: Mapping[str, Format] = {
    "table": Format(writer="terminal:to_text"),
    "markdown": Format(writer="markdown:to_markdown"),
    "latex": Format(writer="latex:to_latex", options=("--caption", "--label")),
    "csv": Format(writer="records:to_csv"),
    "json": Format(writer="records:to_json"),
    "html": Format(writer="page:to_page", needs_file=True, keeps_steps=True, options=("--assets",)),
}
