"""An experiment's folder as an object: launch it, wait for it, and read it as data frames and figures."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncpp_cli.base.errors import INTERRUPTED
from asyncpp_cli.launch.common.options import LaunchOptions
from asyncpp_cli.planner.sweeping import sweep_template

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

    from asyncpp_cli.report.tables.document import Report
    from asyncpp_cli.runs.experiment_folder import Experiment as ExperimentFolder

_POLL_SECONDS = 2.0


def sweep(
    template: str | Path,
    *changes: str | Mapping[str, Any],
    out: str | Path,
    site: str | None = None,
    allow_code: str | Sequence[str] = (),
) -> Experiment:
    """Render a template into a new experiment, or add its missing cells to an existing one.

    Args:
        template: name of a shipped template, or a file.
        changes: settings for all cells: `"train.steps=300"`, `{"train.steps": 300, "matrix.seed": [0, 1]}`.
        out: the experiment's folder.
        site: site profile whose GPUs every cell must fit; None: any.
        allow_code: modules of your own that the template may name, as `--allow-code`.

    Raises:
        UserError: the template, a cell or the folder is not accepted; nothing is written.
    """
    sweep_template(str(template), change_texts(changes), out=Path(out), site=site, allow_code=allow_code)
    return Experiment(out)


def change_texts(changes: Iterable[str | Mapping[str, Any]]) -> list[str]:
    """Settings as the command line takes them, `KEY=VALUE`."""
    texts: list[str] = []
    for change in changes:
        if isinstance(change, str):
            texts.append(change)
        else:
            texts += [f"{key}={json.dumps(value)}" for key, value in change.items()]
    return texts


def open(folder: str | Path) -> Experiment:
    """The experiment in a folder.

    Raises:
        UserError: there is none.
    """
    return Experiment(folder)


class Experiment:
    """An experiment's folder. It holds no state of its own: every call reads the folder.

    In a notebook it is shown as the table of its results.

    Args:
        folder: of the experiment.

    Raises:
        UserError: the folder is not an experiment.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._read()

    def __repr__(self) -> str:
        return f"<asyncpp.Experiment {str(self.folder)!r}: {len(self._read().cells)} cells>"

    @property
    def name(self) -> str:
        return self._read().name

    @property
    def ids(self) -> list[str]:
        """The ids of the runs, one for each cell."""
        return [cell.id for cell in self._read().cells]

    @property
    def cells(self) -> pl.DataFrame:
        """A row for each cell: its id, and a column for each axis of the matrix."""
        return _frame([{"id": cell.id, **cell.axes} for cell in self._read().cells])

    def launch(self, **options: Any) -> bool:
        """Run the cells that are not completed, and show progress on standard error.

        Here (`site="local"`) it returns when all have ended; on a cluster, when they are submitted. Completed
        runs, and runs of another launch, are left alone; failed and interrupted ones resume.

        Args:
            **options: the options of `asyncpp launch`, as `site`, `replay` or `until`
                (`asyncpp_cli.launch.common.options.LaunchOptions`).

        Returns:
            Whether all runs are completed or paused there, or (on a cluster) submitted.

        Raises:
            UserError: a run, the site or an option is not accepted; nothing was started.
            KeyboardInterrupt: after Ctrl-C; the runs started here have saved.
        """
        from asyncpp_cli.launch.start import launch_experiment

        code = launch_experiment(self._read(), LaunchOptions(**options))
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        return code == 0

    def wait(self, *, poll_seconds: float = _POLL_SECONDS) -> bool:
        """Wait until no run is running or queued; returns whether all are completed."""
        while True:
            records = self._status_records()
            waiting = [
                each for each in records if each["state"] == "running" or each["job_state"] == "PENDING"
            ]
            if not waiting:
                return all(each["state"] == "completed" for each in records)
            time.sleep(poll_seconds)

    def status(self) -> pl.DataFrame:
        """A row for each run: id, axes, state, step, training loss, reason; on a cluster its job."""
        return _frame([_flat(record) for record in self._status_records()])

    def results(self) -> pl.DataFrame:
        """A row for each cell, averaged over seeds: loss, gap, throughput, delay, memory, conditions.

        The columns are those of `asyncpp report --format csv` (docs/report.md).
        """
        from asyncpp_cli.report.formats.records import flat_records

        return _frame(flat_records(self._report(keep_steps=False).cells))

    def steps(self) -> pl.DataFrame:
        """Every step and evaluation of every run (`asyncpp_cli.report.formats.records`)."""
        from asyncpp_cli.report.formats.records import step_table

        return step_table(self._report(keep_steps=True).cells)

    def figures(self) -> dict[str, go.Figure]:
        """The report's figures that have data, by name.

        Names: `training-loss`, `validation-loss`, `gap`, `throughput`, `busy`, `memory`, `load`,
        of several validation sets `validation-loss-<set>`, and of a tuned experiment `tuning-<key>`. Losses
        are nats per token.
        """
        import plotly.graph_objects as go

        from asyncpp_cli.report.formats.charts import charts, loss_charts
        from asyncpp_cli.report.formats.plotly_charts import plotly_figure

        report = self._report(keep_steps=True)
        drawn = loss_charts(report.cells) | charts(report)
        return {
            name: go.Figure(plotly_figure(chart)).update_layout(template="plotly_white", margin={"t": 20})
            for name, chart in drawn.items()
        }

    def extend(self, *runs: str, out: str | Path, **changes: Any) -> Experiment:
        """A new experiment whose runs continue these with more steps or another layout, as `asyncpp extend`.

        Args:
            runs: ids, or their beginnings; none: all.
            out: folder of the new experiment, new or empty.
            **changes: `steps` in all, `stages`, `data` (ranks), and further keys with `__` for the dot:
                `optimizer__schedule="constant"`.

        Raises:
            UserError: a run has no valid checkpoint or is running, or a change is not accepted; nothing is
                written.
        """
        from asyncpp_cli.experiment.continuation import SHORT_NAMES, continuations, write_continuations
        from asyncpp_cli.runs.experiment_folder import select_runs

        experiment = self._read()
        keys = {SHORT_NAMES.get(name, name.replace("__", ".")): value for name, value in changes.items()}
        continued = continuations(experiment, select_runs(experiment, runs), changes=keys)
        write_continuations(continued, experiment, out=Path(out))
        return Experiment(out)

    def remove(self, *runs: str, yes: bool = False) -> None:
        """Remove runs and their cells with all that they have measured, as `asyncpp remove`.

        Args:
            runs: ids, or their beginnings.
            yes: agree to the loss; otherwise the error says what would be lost.

        Raises:
            UserError: a run is running or queued, no run would be left, or `yes` is not given; nothing is
                removed.
        """
        from asyncpp_cli.base.errors import UserError
        from asyncpp_cli.experiment.removal import checked, remove_runs
        from asyncpp_cli.runs.experiment_folder import select_runs

        experiment = self._read()
        if not runs:
            raise UserError("no runs given; accepted: ids of runs, or their beginnings")
        chosen = list({run.id: run for run in select_runs(experiment, runs)}.values())
        lost = checked(experiment, chosen)
        if not yes:
            named = "; ".join(each.text for each in lost)
            raise UserError(f"this would remove {named}; yes=True agrees")
        remove_runs(experiment, chosen)

    def diff(self, other: str | Path | Experiment) -> dict[str, Any]:
        """What differs between this experiment (a) and another, a run or a cell (b).

        The content of `asyncpp diff --json`.

        Args:
            other: an experiment; or a path: DIR, DIR/runs/ID, or DIR/BEGINNING of the ids of a cell's runs.

        Raises:
            UserError: the path names no experiment or run.
        """
        from asyncpp_cli.base.errors import need_polars

        need_polars()
        from asyncpp_cli.report.analysis.difference import difference
        from asyncpp_cli.report.load.experiments import load_selection

        path = other.folder if isinstance(other, Experiment) else Path(other)
        return difference(load_selection(self.folder), load_selection(path))

    def _read(self) -> ExperimentFolder:
        # Imported on first use, as everything that takes long.
        from asyncpp_cli.runs.experiment_folder import open_experiment

        return open_experiment(self.folder)

    def _status_records(self) -> list[dict[str, Any]]:
        from asyncpp_cli.slurm.run_status import SlurmQueue, status_records

        experiment = self._read()
        return status_records(experiment, SlurmQueue(experiment).run_statuses(with_accounting=True))

    def _report(self, *, keep_steps: bool) -> Report:
        from asyncpp_cli.base.errors import need_polars

        need_polars()
        from asyncpp_cli.report.build import build_report
        from asyncpp_cli.report.formats.options import ReportOptions

        return build_report([self._read()], ReportOptions(), keep_steps=keep_steps)

    def _repr_html_(self) -> str:
        from asyncpp_cli.report.formats.page import html_table

        report = self._report(keep_steps=False)
        lines = "".join(f"<p>{escape(line)}</p>" for line in (*report.first_line, *report.summary))
        return f"<h4>{escape(report.name)}</h4>{html_table(report.table(width=None))}{lines}"


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """The record of a run with each axis as a field of its own."""
    fields = {"id": record["id"], **record["axes"]}
    return fields | {name: value for name, value in record.items() if name not in ("id", "axes")}


def _frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    from asyncpp_cli.base.errors import need_polars

    need_polars()
    from asyncpp_cli.report.formats.records import frame_of

    return frame_of(rows)
