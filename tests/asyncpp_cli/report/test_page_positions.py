"""What the charts of a page of 50 cells draw is where their axes say, and nothing of it leaves the page."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.browser import Page
from support.command_line import succeeded
from support.report_experiment import ExperimentFolder, cells_of, metrics, settings

from asyncpp_cli.runs.status import State, Status

pytestmark = [pytest.mark.slow, pytest.mark.browser]

LENGTHS = (4, 6, 8, 12, 16)
RATES = (0.001, 0.002, 0.004, 0.008, 0.016)

READ = """(() => {
  const name = %r, chart = document.getElementById(`${name}-chart`);
  const middle = (found) => {
    const box = found.getBoundingClientRect();
    return [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
  };
  const all = (selector) => [...chart.querySelectorAll(selector)];
  const ticks = (axis) => all(`.${axis}tick text`).map((tick) => [tick.textContent, ...middle(tick)]);
  const colours = all(".hm image").map((image) => {
    const box = image.getBoundingClientRect();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [Math.round(box.width), Math.round(box.height)];
    const brush = canvas.getContext("2d", { willReadFrequently: true });
    brush.drawImage(image, 0, 0, canvas.width, canvas.height);
    const at = (x, y) => [...brush.getImageData(x - box.left, y - box.top + 5, 1, 1).data];
    return ticks("y").map(([, , y]) => ticks("x").map(([, x]) => at(x, y)));
  });
  const ends = all(".scatterlayer path.js-line").map((path) => {
    const end = path.getPointAtLength(path.getTotalLength()).matrixTransform(path.getScreenCTM());
    return [end.x, end.y];
  });
  const bars = all(".bars .point path").map((bar) => [bar.getBoundingClientRect().right, middle(bar)[1]]);
  const points = all(".scatterlayer .trace").map((t) => [...t.querySelectorAll(".points path")].map(middle));
  return { x: ticks("x"), y: ticks("y"), colours: colours[0], ends, bars, points };
})()"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two schedules at five rates in five lengths: no two numbers of their cells are the same."""
    folder = tmp_path_factory.mktemp("fifty")
    experiment = ExperimentFolder(folder / "experiment")
    for place, (schedule, rate, steps) in enumerate(
        (schedule, rate, steps) for schedule in ("1f1b", "2bw") for rate in RATES for steps in LENGTHS
    ):
        loss = 2 + 0.013 * (place * 7 % 50)
        rows = metrics(
            val_losses=(4.0, loss),
            evaluated=(steps // 2, steps),
            steady=((1000, 2.0), (1000 + 200 * (place * 11 % 50), 2.0)),
            busy=((0.5, 0.5), (0.02 * (place * 3 % 50), 0.02 * (place * 17 % 50))),
            delay=int(schedule == "2bw"),
        )
        described = {"tokens": 9, "evaluated_tokens": 9, "bytes_per_token": 1.0, "unigram_bits_per_byte": 4.0}
        rows[0]["validation"] = {name: described | {"sha256": name} for name in ("data", "web")}
        for row in rows:
            if row["kind"] == "segment":
                row["memory"] = {"total": [1_000_000 * (1 + place * 13 % 50), 1_000_000], "device_peak": []}
                row["experts"] = {
                    "blocks": [0],
                    "max_over_mean": [1 + 0.1 * (place * 19 % 50)],
                    "entropy": [0.9],
                    "never_chosen": [0],
                }
            if row["kind"] == "eval":
                row["sets"] = {
                    "data": {"val_loss": row["val_loss"]},
                    "web": {"val_loss": row["val_loss"] + 0.5},
                }
        keys = {"optimizer.lr": rate, "train.steps": steps}
        experiment.add(
            settings(schedule, "muon", **keys),
            rows=rows,
            axes=keys,
            status=Status(state=State.COMPLETED, attempt=1, step=steps, steps=steps),
        )
    succeeded("report", experiment.folder, "--format", "html", "--out", folder / "page.html")
    return folder / "page.html"


@pytest.fixture(scope="module")
def cells(written: Path) -> dict[str, dict[str, Any]]:
    """The record of each cell, by the arm's name without blanks, as labels of several lines have it."""
    text = re.search(r'id="data">(.*)</script>', written.read_text(encoding="utf-8"))
    assert text is not None
    arms = json.loads(text[1])["arms"]
    records = cells_of(written.parent / "experiment")
    return {arm["name"].replace(" ", ""): cell for arm, cell in zip(arms, records, strict=True)}


def shown(page: Page, chart: str, *, all_arms: bool) -> dict[str, Any]:
    """What a chart draws, and the labels of its axes, in pixels."""
    page.value(f"document.querySelectorAll('#arm-list .buttons button')[{int(not all_arms)}].click()")
    if not all_arms:
        boxes = "document.querySelectorAll('#arm-list input[type=checkbox]')"
        page.value(f"[3, 8, 31, 44].forEach(n => {boxes}[n].click())")
    page.value("new Promise(r => setTimeout(r, 50))")
    found: dict[str, Any] = page.value(READ % chart)
    return found


def number(text: str) -> float:
    value = float(re.sub(r"[^\d.+-]", "", text.replace("−", "-")))
    return value * {"k": 1e3, "M": 1e6}.get(text[-1], 1)


def scale(ticks: list[list[Any]], place: int) -> Any:
    """From pixels to the axis's numbers, by its first and last label."""
    (one, *first), (other, *last) = ticks[0], ticks[-1]
    per_pixel = (number(other) - number(one)) / (last[place] - first[place])
    return lambda pixel: number(one) + (pixel - first[place]) * per_pixel


@pytest.mark.parametrize("all_arms", [True, False])
def test_every_row_is_drawn_beside_its_label(page: Page, cells: dict[str, Any], *, all_arms: bool) -> None:
    def rows(chart: str, of: str) -> tuple[dict[str, Any], list[Any]]:
        found = shown(page, chart, all_arms=all_arms)
        assert len(found["y"]) == (50 if all_arms else 4) or chart == "gap"
        return found, [cells[label.replace(" ", "")][of] for label, *_ in found["y"]]

    for chart, field in (
        ("busy", "busy_by_rank"),
        ("memory", "peak_memory_by_rank"),
        ("load", "load_by_block"),
    ):
        found, values = rows(chart, field)
        least = 1.0 if chart == "load" else 0.0
        most = 1.0 if chart == "busy" else max(max(cell[field]) for cell in cells.values())
        for row, colours in zip(values, found["colours"], strict=True):
            for value, colour in zip(row, colours, strict=True):
                share = (value - least) / (most - least)
                expected = [255 + share * (end - 255) for end in (0x2F, 0x8F, 0xC4)]
                assert colour[:3] == pytest.approx(expected, abs=3), (chart, value)
    found, speeds = rows("throughput", "tokens_per_second")
    of_pixel = scale(found["x"], 0)
    assert [of_pixel(right) for right, _ in found["bars"]] == pytest.approx(speeds, rel=0.01)
    assert [y for _, y in found["bars"]] == pytest.approx([y for _, _, y in found["y"]], abs=2)
    found, gaps = rows("gap", "gap")
    of_pixel = scale(found["x"], 0)
    for trace in found["points"]:
        assert [of_pixel(x) for x, _ in trace] == pytest.approx(gaps, abs=0.01)
        assert [y for _, y in trace] == pytest.approx([y for _, _, y in found["y"]], abs=2)


def test_every_line_ends_where_its_arm_does(page: Page, cells: dict[str, Any]) -> None:
    page.value("document.querySelector('[data-kind=val]').click()")
    for chart, field, further in (("loss", "val_loss", 0), ("validation-loss-web", "web.val_loss", 0)):
        found = shown(page, chart, all_arms=True)
        y = scale(found["y"], 1)
        ends = sorted(y(pixel) for _, pixel in found["ends"])
        assert ends == pytest.approx(sorted(cell[field] + further for cell in cells.values()), abs=0.02)
    found = shown(page, "time", all_arms=True)
    y = scale(found["y"], 1)
    longest = [cell["val_loss"] for cell in cells.values() if cell["train.steps"] == LENGTHS[-1]]
    ends = {round(y(pixel), 2) for _, pixel in found["ends"]}
    assert all(min(abs(end - loss) for loss in longest) < 0.02 for end in ends)
    assert page.messages == []


def test_a_chart_is_saved_as_numbers_and_losses_have_a_log_axis(page: Page, cells: dict[str, Any]) -> None:
    page.value("URL.createObjectURL = (blob) => { window.saved = blob; return '#'; }; 0")
    button = "document.querySelector('#throughput-chart [data-title=\"Download the numbers as CSV\"]')"
    shown(page, "throughput", all_arms=True)
    page.value(f"{button}.click()")
    header, *lines = csv.reader(page.value("window.saved.text()").splitlines())
    assert header == ["arm", "x", "y"]
    speeds = {name.replace("<br>", "").replace(" ", ""): float(speed) for name, speed, _ in lines}
    assert speeds == {name: cell["tokens_per_second"] for name, cell in cells.items()}
    page.value("document.querySelector('[data-scale=log]').click()")
    chart = "document.getElementById('loss-chart')"
    assert page.value(f"{chart}._fullLayout.yaxis.type") == "log"
    page.value("document.querySelector('[data-scale=linear]').click()")
    assert page.value(f"{chart}._fullLayout.yaxis.type") == "linear"
    assert page.messages == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(page: Page, written: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_core_python", reason="no axe-core (pip install axe-core-python)")
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.open(written)
    page.value(f"{Path(axe.__path__[0], 'axe.min.js').read_text(encoding='utf-8')}; 0")
    found = page.value(
        "axe.run(document).then(found => found.violations.map(each => [each.id, each.impact]))"
    )
    page.call("Emulation.setEmulatedMedia", features=[])
    assert found == []


def test_no_button_sends_anything(page: Page, written: Path) -> None:
    """Also none of plotly's: a chart would go to another address by a window of its own."""
    page.requests.clear()
    page.open(written)
    titles = set(page.value("[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)"))
    saved = {"Download plot", "Download the numbers as CSV"}
    assert titles == saved | {"Zoom", "Pan", "Zoom in", "Zoom out", "Autoscale", "Reset axes"}
    page.value(
        "window.opened = []; window.open = (...asked) => { window.opened.push(asked); return null; }; 0"
    )
    each = "button:not(.pin), .arm:first-of-type .pin, .modebar-btn"
    page.value(f"[...document.querySelectorAll('{each}')].forEach(button => button.click())")
    page.value("new Promise(r => setTimeout(r, 300))")
    assert page.value("window.opened") == []
    assert page.value("document.querySelectorAll('[class*=cloud]').length") == 0
    asked = [address for address in page.requests if not address.startswith(("data:", "blob:"))]
    assert asked == [written.absolute().as_uri()]
    assert page.messages == []
