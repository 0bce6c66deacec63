"""A report before it is written: its cells, its table, and what stands under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncpp_cli.report.cells import Cell
from asyncpp_cli.report.conditions import conditions_lines
from asyncpp_cli.report.pivot import pivot, values_of
from asyncpp_cli.report.table import Table, table_of_cells
from asyncpp_cli.report.words import in_words


@dataclass(frozen=True, kw_only=True)
class Report:
    """The cells of one or several experiments, and how they are to be laid out."""

    name: str
    cells: Sequence[Cell]
    notes: Sequence[str]
    """What a reader must know about the files or the averaging."""
    choices: Sequence[str] = ()
    """Which values were kept of those that were tried, and how sure that is."""
    rows: Sequence[str] = ()
    """Keys whose values lead the rows."""
    cols: Sequence[str] = ()
    """Keys whose values stand side by side; none: a row a cell."""
    values: str = "val_loss"
    """With `cols`: what to say of each cell, by the names of columns."""

    def table(self, *, width: int | None) -> Table:
        """The table for people.

        Args:
            width: columns of a terminal that it should fit into; None: any.
        """
        if self.cols:
            values = values_of(self.values, self.cells)
            return pivot(self.cells, rows=self.rows, cols=self.cols, values=values)
        return table_of_cells(self.cells, width=width, leading=self.rows)

    @property
    def words(self) -> list[str]:
        """The answer, as sentences."""
        return [*self.choices, *in_words(self.cells)]

    @property
    def troubles(self) -> list[str]:
        """Why runs ended early, what was wrong with files, what was not averaged."""
        return [*(reason for cell in self.cells for reason in cell.reasons), *self.notes]

    @property
    def conditions(self) -> list[str]:
        """What the numbers were measured under."""
        return conditions_lines(self.cells)
