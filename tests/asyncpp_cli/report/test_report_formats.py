"""One report in every form and file: the numbers are the same, and names do no harm in any of them."""

from __future__ import annotations

import csv
import html
import html.parser
import io
import json
import re
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from hypothesis import Phase, example, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from support import report_experiment
from support.command_line import asyncpp, refusal, succeeded
from support.report_experiment import ExperimentFolder, metrics, quickstart_folder, report_of, settings

from asyncpp_cli.base.console import printable
from asyncpp_cli.report.analysis.aggregate import aggregate
from asyncpp_cli.report.analysis.further_runs import EXAMPLE
from asyncpp_cli.report.formats.charts import charts
from asyncpp_cli.report.formats.figures import write_figures
from asyncpp_cli.report.formats.latex import to_latex
from asyncpp_cli.report.formats.options import ReportOptions
from asyncpp_cli.report.formats.page import page_data, to_page
from asyncpp_cli.report.formats.records import to_csv, to_json
from asyncpp_cli.report.formats.text import to_markdown, to_text
from asyncpp_cli.report.load.measure import Slowest
from asyncpp_cli.report.tables import columns as columns_module
from asyncpp_cli.report.tables.column import single
from asyncpp_cli.report.tables.columns import records, shown_columns
from asyncpp_cli.report.tables.document import Report
from asyncpp_cli.runs.status import State, Status

HOSTILE = "</script><script>alert(1)</script>|[bold]\x1b[31m`x`$\\input{a}$_%&<img src=x onerror=alert(1)>"


class Tags(html.parser.HTMLParser):
    """The elements of a page as a browser finds them: their names and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def table_rows(page: str) -> list[list[str]]:
    """The texts of a page's table cells by row."""
    rows = re.findall(r"<tr.*?</tr>", page, re.DOTALL)
    cells = [re.findall(r"<t[dh][ >].*?</t[dh]>", row, re.DOTALL) for row in rows]
    return [[html.unescape(re.sub(r"<.*?>", "", cell)) for cell in row] for row in cells]


def page_of(report: Report, folder: Path) -> str:
    """The page without plotly, which knows nothing of the report."""
    page = to_page(report, ReportOptions(out=folder / "page.html"))
    begin = page.index('<script type="text/plain" id="plotly">')
    return page[:begin] + page[page.index("</script>", begin) + len("</script>") :]


FINITE = st.floats(0.5, 20.0)


# Not shrunk, which takes minutes: thirteen numbers can be read as they are.
@settings_of_hypothesis(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
@example(losses=[1.0] * 6, seconds=[1.0] * 6, busy=1.0)
@given(
    losses=st.lists(FINITE, min_size=6, max_size=6),
    seconds=st.lists(st.floats(0.01, 100.0), min_size=6, max_size=6),
    busy=st.floats(0.05, 1.0),
)
@pytest.mark.slow
def test_page_csv_terminal_and_json_have_the_same_numbers(
    losses: list[float], seconds: list[float], busy: float
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        experiment = ExperimentFolder(folder / "experiment")
        for place, (loss, time) in enumerate(zip(losses, seconds, strict=True)):
            measured = {"steady": ((1000, time), (500, time)), "busy": ((busy, 0.5), (0.9, 1.0))}
            rows = metrics(val_losses=(25.0, loss), **measured)  # above all: charts leave out what diverged
            experiment.add(settings(("1f1b", "2bw")[place % 2], "muon", seed=place // 2), rows=rows)
        report = report_of(experiment.folder, keep_steps=True)
        cells = json.loads(to_json(report))
        in_csv = list(csv.DictReader(io.StringIO(to_csv(report))))
        on_page = json.loads(page_data(report.cells, charts(report)))
        page = table_rows(page_of(report, folder))
        terminal, markdown = to_text(report), to_markdown(report)
        for place, cell in enumerate(cells):
            # The records hold the same values, as far as a form has types for them.
            in_json_alone = {"answer", "best", "conditions", "verdicts"}
            assert cell.keys() - in_csv[place].keys() == in_json_alone
            for key, value in cell.items():
                if isinstance(value, float | int) and not isinstance(value, bool):
                    assert float(in_csv[place][key]) == value, key
                elif value is None and key not in in_json_alone:
                    assert in_csv[place][key] == "", key
            assert on_page["arms"][place]["val_loss"] == cell["val_loss"]
            drawn = {name: of_arm(chart["data"][0], place) for name, chart in on_page["charts"].items()}
            for name, key in (("gap", "gap"), ("throughput", "tokens_per_second"), ("busy", "busy_by_rank")):
                assert drawn[name] == cell[key]
            speed = cell["tokens_per_second"]
            # The tables say them to the digits that they show.
            shown = [
                f"{cell['val_loss']:.3f}±{(cell['val_loss_high'] - cell['val_loss_low']) / 2:.3f}",
                f"{cell['bits_per_byte']:.3f}",
                f"{speed:,.0f}",
                f"{cell['bubble']:.0%} ({cell['bubble_predicted']:.0%})",
            ]
            if cell["gap"] is not None:
                half = (cell["gap_high"] - cell["gap_low"]) / 2
                low, high = (cell[f"throughput_ratio_{end}"] for end in ("low", "high"))
                ratio = f"{cell['throughput_ratio']:.2f} [{low:.2f}, {high:.2f}]"
                shown += [f"{cell['gap']:+.3f}±{half:.3f}", ratio if high <= 4 * low else "cannot be told"]
            # A ratio above what the bubble allows is shown with that bound.
            assert set(shown) <= {without_bound(text) for text in page[place + 1]}
            [line] = [line for line in terminal.splitlines() if line.startswith(f"{cell['schedule']} ")]
            [row] = [line for line in markdown.splitlines() if line.startswith(f"| {cell['schedule']} ")]
            in_markdown = without_bound(re.sub(r"\\(.)", r"\1", row))
            assert [text for text in shown if text not in line or f" {text} |" not in in_markdown] == []


def without_bound(text: str) -> str:
    return re.sub(r" \(max [\d.]+\)", "", text)


def of_arm(trace: dict[str, Any], arm: int) -> Any:
    """What a chart of one row per arm shows of an arm; None: it has no row."""
    if arm not in trace["meta"]:
        return None
    return trace["z" if "z" in trace else "x"][trace["meta"].index(arm)]


def test_a_column_is_declared_once_for_every_form(
    quickstart: ExperimentFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = report_of(quickstart.folder)
    known = records(report.cells)[0]
    assert [column.key for column in shown_columns(report.cells) if column.key not in known] == []
    column = single("half_loss", "half\nloss", lambda cell: cell.val_loss.mean / 2, form="{:.4f}")
    measured = columns_module.measured_columns
    monkeypatch.setattr(columns_module, "measured_columns", lambda cells: [*measured(cells), column])
    number = report.cells[0].val_loss.mean / 2
    for each in (replace(report), replace(report, cols=("optimizer",), values="half_loss")):
        latex, page = to_latex(each, ReportOptions()), page_of(each, tmp_path)
        for text in (to_text(each), to_markdown(each), latex, page):
            assert "half" in text
            assert f"{number:.4f}" in text
    assert json.loads(to_json(report))[0]["half_loss"] == number
    assert float(next(csv.DictReader(io.StringIO(to_csv(report))))["half_loss"]) == number


@pytest.fixture
def hostile(tmp_path: Path) -> Report:
    experiment = ExperimentFolder(tmp_path / "experiment", name=HOSTILE)
    for seed in range(2):
        experiment.add(settings("1f1b", "muon", seed=seed, **{"model.name": HOSTILE}))
    failed = Status(state=State.FAILED, reason=HOSTILE)
    names = {"model.name": HOSTILE, "data.path": HOSTILE}
    experiment.add(settings("2bw", "muon", **names), status=failed, axes={"data.path": HOSTILE})
    return report_of(experiment.folder, keep_steps=True)


def test_names_with_markup_in_them_stay_text(hostile: Report, tmp_path: Path) -> None:
    tags = Tags(page_of(hostile, tmp_path)).found
    # The data and our own script; plotly's was cut out.
    assert [tag for tag, _ in tags].count("script") == 2
    assert [name for _, attributes in tags for name in attributes if name.startswith("on")] == []
    links = {attributes[name] for _, attributes in tags for name in ("href", "src") if name in attributes}
    assert links == {"#table", *(f"experiment/runs/run-{number}/" for number in range(3))}
    assert "<" not in page_data(hostile.cells, {})
    assert HOSTILE in json.loads(page_data(hostile.cells, {}))["arms"][1]["name"]
    assert json.loads(to_json(hostile))[0]["model"] == HOSTILE

    latex, markdown, text = to_latex(hostile, ReportOptions()), to_markdown(hostile), to_text(hostile)
    assert "\x1b" not in latex + markdown + text
    assert "[bold]" in text
    assert "<script>" not in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert [line for line in latex.splitlines() if "\\input" in line and not line.startswith("% ")] == []
    assert "\\textbackslash{}input\\{a\\}" in latex
    rows = [line for line in latex.splitlines() if line.strip().startswith(("1f1b", "2bw")) and "&" in line]
    assert (len(rows), len({len(re.findall(r"(?<!\\)&", row)) for row in rows})) == (2, 1)
    # Every special character outside of our own commands is escaped.
    [caption] = [line for line in latex.splitlines() if "caption" in line]
    inner = caption.removeprefix("  \\caption{").removesuffix("}")
    assert re.findall(r"(?<!\\)[$&#%_]", inner.replace(r"$\pm$", "")) == []


def test_commands_in_sentences_can_be_copied_from_every_format(tmp_path: Path) -> None:
    said = f"{EXAMPLE} {HOSTILE} *not* `one` more"
    report = report_of(quickstart_folder(tmp_path / "experiment", seeds=1).folder)
    report = replace(report, notes=[said])
    assert f"% {printable(said)}\n" in to_latex(report, ReportOptions())
    [line] = [line for line in to_markdown(report).splitlines() if EXAMPLE in line and "*not" in line]
    assert r"\*not\* `one` more" in line
    assert "<script>" not in re.sub("`[^`]+`", "", line)


def test_latex_is_a_float_of_the_table_with_a_papers_caption_and_comments(tmp_path: Path) -> None:
    experiment = quickstart_folder(tmp_path / "experiment", seeds=3)
    rate = {"optimizer.lr": 0.002}
    experiment.add(settings("2bw", "soap", **rate), rows=metrics(), axes=rate)
    report = report_of(experiment.folder)
    inside, end, after = to_latex(report, ReportOptions()).partition("\\end{table}\n")
    assert re.search(r"\\caption\{.*\}\n  \\label\{tab:[a-z0-9-]+\}\n", inside)
    [caption] = re.findall(r"\\caption\{(.*)\}", inside)
    assert caption == (
        "Validation loss and throughput of 1f1b and 2bw with adamw, muon and soap, nano, "
        "4 steps of 2,048 tokens. "
        "Mean over 1 to 3 seeds. Gap: loss minus that of the synchronous counterpart, nats per token. "
        r"{*}: the lowest loss. $\pm$ is half of a 95\% interval: of a loss, of its mean over seeds "
        r"(Student's t); of a gap, of the mean difference between runs with the same seed. "
        r"{[}low, high] is a 95\% interval, from logarithms."
    )
    [layout] = re.findall(r"begin\{tabular\}\{([lr]+)\}", inside)
    body = inside[inside.index("\\toprule") : inside.index("\\bottomrule")]
    rows = [line for line in body.splitlines() if line.endswith("\\\\")]
    assert {len(row.split(" & ")) for row in rows} == {len(layout)}
    assert "$\\pm$" in body
    assert (inside + end).count("{") == (inside + end).count("}")
    assert " & optimizer.lr & " in inside
    assert "\\par" not in inside
    assert all(line.startswith("% ") for line in after.splitlines())
    assert len(after.splitlines()) > len([*report.summary, *report.problems, *report.conditions]) > 0
    assert "% Same in all rows: " in after
    assert "% Columns hidden at this width: " in after
    own = ["--caption", r"Delays \emph{cost}.", "--label", "tab:own"]
    printed = asyncpp("report", experiment.folder, "--format", "latex", *own)
    assert "  \\caption{Delays \\emph{cost}.}\n  \\label{tab:own}\n" in printed.output


def test_the_curves_of_many_runs_fit_into_what_they_may_take(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "experiment")
    for seed in range(8):
        rows = metrics(evaluated=(200, 400))
        for row in rows:
            if row["kind"] == "step":
                row["train_loss"] = 7.5 if row["step"] == 201 else 2 + 1 / row["step"]
        experiment.add(settings("1f1b", "muon", seed=seed, **{"train.steps": 400}), rows=rows)
    cells = report_of(experiment.folder, keep_steps=True).cells
    whole = page_data(cells, {})
    assert [len(run["train"]["loss"]) for run in json.loads(whole)["arms"][0]["runs"]] == [400] * 8
    text = page_data(cells, {}, most_characters=20_000)
    assert len(text) <= 20_000 < len(whole)
    for run in json.loads(text)["arms"][0]["runs"]:
        assert (max(run["train"]["loss"]), min(run["train"]["loss"])) == (7.5, 2.0025)
        assert (run["train"]["step"][0], run["train"]["step"][-1]) == (1, 400)
        mean = sum(run["mean"]["loss"]) / len(run["mean"]["loss"])
        assert mean == pytest.approx(2.03, abs=0.02)


FORMULA = "$\\frac{1}{2}$ a_b^c <x>"


@pytest.mark.slow
@pytest.mark.parametrize("output_format", ["table", "markdown", "csv", "json"])
def test_out_holds_what_standard_output_would(
    quickstart: ExperimentFolder, tmp_path: Path, output_format: str
) -> None:
    file = tmp_path / "report.txt"
    file.write_text("an older report")
    words = ("report", quickstart.folder, "--format", output_format)
    printed, written = succeeded(*words), succeeded(*words, "--out", file)
    assert (file.read_text(), written.output) == (printed.output, "")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.txt"]


@pytest.mark.slow
def test_figures_are_pictures_of_each_format_and_replace_figures_alone(tmp_path: Path) -> None:
    """Of names that look like formulas, too; and the same numbers make the same files."""
    experiment = ExperimentFolder(tmp_path / "experiment")
    for schedule in ("1f1b", "2bw"):
        for path in ("plain", FORMULA):
            named = settings(schedule, "muon", **{"data.path": path})
            experiment.add(named, axes={"data.path": path}, rows=metrics())
    figures = tmp_path / "figures"
    (figures / "deep").mkdir(parents=True)
    own = figures / "gap.svg"
    own.write_text("<svg>drawn by hand</svg>")
    words = ("report", experiment.folder, "--format", "json", "--figures", figures)
    assert "gap.svg exists and was not written by asyncpp report" in refusal(*words)
    assert own.read_text() == "<svg>drawn by hand</svg>"
    assert sorted(path.name for path in figures.iterdir()) == ["deep", "gap.svg"]
    own.unlink()
    (figures / "deep").rmdir()
    for _ in range(2):  # its own are replaced
        assert len(json.loads(succeeded(*words).output)) == 4
    names = {"training-loss", "validation-loss", "gap", "throughput", "busy"}
    assert {(file.stem, file.suffix) for file in figures.iterdir()} == {
        (name, suffix) for name in names for suffix in (".svg", ".pdf", ".png")
    }
    for name in names:
        assert (figures / f"{name}.svg").read_text().startswith("<?xml")
        assert (figures / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        pixels = matplotlib.image.imread(figures / f"{name}.png")
        assert pixels.min() < 0.5 < pixels.max()
    report = report_of(experiment.folder, keep_steps=True)
    for file, inches in (("gap", 5.5), ("training-loss", 3.3)):
        folder = tmp_path / f"{inches}"
        again = write_figures(report, folder=folder, width=inches)
        assert matplotlib.image.imread(folder / f"{file}.png").shape[1] == int(inches * 200)
        if inches == 5.5:
            same = [(figures / each.name).read_bytes() for each in again]
            assert [each.read_bytes() for each in again] == same


def test_a_tuple_or_a_mapping_is_json_in_csv() -> None:
    plain = report_experiment.run("1f1b", axes={"data.sources": {"wiki": 1}})
    slowest = Slowest(rank=0, ratio=1.0, peer=(0, 1), peer_ratio=1.1, host="node0")
    cells, notes = aggregate([replace(plain, slowest=slowest)])
    report = Report(name="x", cells=cells, notes=notes)
    [record], [row] = json.loads(to_json(report)), csv.DictReader(io.StringIO(to_csv(report)))
    for key in ("slowest_peer", "data.sources"):
        assert json.loads(row[key]) == record[key]


def test_long_names_leave_room_for_the_plot_in_a_narrow_column(tmp_path: Path) -> None:
    cells, notes = aggregate(
        [
            report_experiment.run(schedule, axes={"data.path": path}, **{"data.path": path})
            for schedule in ("1f1b", "2bw")
            for path in ("a-text-of-a-long-name", "another-text-of-a-name-that-is-longer-still")
        ]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of axes without any room
        assert write_figures(Report(name="x", cells=cells, notes=notes), folder=tmp_path / "f", width=3.3)
