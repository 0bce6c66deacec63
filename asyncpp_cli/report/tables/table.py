"""The table of a report's cells, before it is written as text, Markdown, LaTeX or HTML."""

from __future__ import annotations

from collections.abc import Sequence

from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.tables.columns import shown_columns
from asyncpp_cli.tables import Heading, Table


def table_of_cells(cells: Sequence[CellResult], *, leading: Sequence[str] = ()) -> Table:
    """The table with a row for each cell.

    Args:
        cells: the rows.
        leading: keys whose columns come first.
    """
    shown = shown_columns(cells)
    shown.sort(key=lambda column: leading.index(column.key) if column.key in leading else len(leading))
    headings = [
        Heading(
            key=column.key,
            title=column.title,
            right=column.right,
            secondary=column.secondary or column.move_order is not None or column.drop_order is not None,
            share_order=column.move_order,
            hide_order=column.drop_order,
        )
        for column in shown
    ]
    rows = [[column.text(cell) for column in shown] for cell in cells]
    return Table(headings=headings, rows=rows, states=[cell.state for cell in cells])
