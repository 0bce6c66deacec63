"""A report before it is written: its cells, their table, and the text below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncpp_cli.base.tables import Table
from asyncpp_cli.report.analysis.answer import answer
from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.analysis.conditions import conditions_lines
from asyncpp_cli.report.analysis.failures import failures
from asyncpp_cli.report.analysis.summary import summary_lines
from asyncpp_cli.report.analysis.transfer import Transfer, transfer_lines
from asyncpp_cli.report.analysis.verdict import verdicts
from asyncpp_cli.report.analysis.verdict_text import verdict_lines
from asyncpp_cli.report.load.run import UNFINISHED
from asyncpp_cli.report.tables.columns import meaning, shown_columns, value_columns
from asyncpp_cli.report.tables.pivot import pivot
from asyncpp_cli.tune.result import Tuning

BEST = "*"
"""Mark of the best row."""


@dataclass(kw_only=True)
class Report:
    """The cells of one or several experiments, and the layout of their table."""

    name: str
    cells: Sequence[CellResult]
    notes: Sequence[str]
    """Remarks on the files and on what was averaged."""
    choices: Sequence[str] = ()
    """Values kept by `--best-over`, with their certainty."""
    rows: Sequence[str] = ()
    """Keys that lead the rows."""
    cols: Sequence[str] = ()
    """Keys whose values become columns; empty: one row for each cell."""
    values: str = "val_loss"
    """With `cols`: the columns shown for each cell, by key."""

    tunings: Sequence[Tuning] = ()
    """Tunings among the experiments; their cells are each arm's best candidate."""
    transfers: Sequence[Transfer] = ()
    """The verdicts carried over to a planned run (`--for`)."""

    def __post_init__(self) -> None:
        self.answer = answer(self.cells)
        """The best arm; None without a loss."""
        self.verdicts = verdicts(self.cells)
        self.failures = failures(self.cells)
        best = None if self.answer is None else self.answer.best
        self.table_of_cells = table_of_cells(self.cells, leading=self.rows, best=best)
        """The table with a row for each cell, the best one marked."""

    def table(self, *, width: int | None) -> Table:
        """The table to show.

        Args:
            width: characters of a line to fit into, as far as the main columns allow; None: any.
        """
        if self.cols:
            values = value_columns(self.values, self.cells)
            table = pivot(self.cells, rows=self.rows, cols=self.cols, values=values)
        elif width is None:
            table = self.table_of_cells
        else:
            table = self.table_of_cells.without(_extra(self.table_of_cells))
        return table.fitted(width, essential=False)

    @property
    def unfinished(self) -> bool:
        """Whether numbers of a run are still to come."""
        return any(run.state in UNFINISHED for cell in self.cells for run in cell.runs)

    @property
    def first_line(self) -> list[str]:
        """The best arm in a sentence, above everything else; empty without a loss."""
        return [] if self.answer is None else [self.answer.sentence]

    @property
    def summary(self) -> list[str]:
        """The results in sentences, and last what they do not answer."""
        found, not_answered = verdict_lines(self.cells, self.verdicts)
        tuned = [sentence for tuning in self.tunings for sentence in tuning.sentences]
        further = [*transfer_lines(self.transfers), *tuned, *self.choices, *summary_lines(self.cells)]
        return [*found, *further, *not_answered]

    @property
    def problems(self) -> list[str]:
        """Why runs ended early, damaged files, and runs that were not averaged."""
        return [*(failure.line for failure in self.failures), *self.notes]

    @property
    def conditions(self) -> list[str]:
        """The conditions of the measurements."""
        return conditions_lines(self.cells)


def _extra(table: Table) -> set[str]:
    """Keys of columns that lines of limited width are too short for, unless something happened."""
    return {
        heading.key
        for place, heading in enumerate(table.headings)
        if heading.extra
        and (
            heading.key not in ("skipped_steps", "restarts")
            or {row[place] for row in table.rows} <= {"0", "-"}
        )
    }


def table_of_cells(
    cells: Sequence[CellResult], *, leading: Sequence[str] = (), best: CellResult | None = None
) -> Table:
    """The table with a row for each cell.

    Args:
        cells: the rows.
        leading: keys whose columns come first.
        best: the cell to mark.
    """
    shown = shown_columns(cells)
    shown.sort(key=lambda column: leading.index(column.key) if column.key in leading else len(leading))
    rows = [[column.text(cell) for column in shown] for cell in cells]
    legend = meaning([text for row in rows for text in row])
    for cell, row in zip(cells, rows, strict=True):
        if cell is best and len(cells) > 1:
            row[0] = f"{row[0]} {BEST}"
            legend = f"{BEST}: the lowest loss. {legend}"
    return Table(headings=shown, rows=rows, states=[cell.state for cell in cells], legend=legend.strip())
