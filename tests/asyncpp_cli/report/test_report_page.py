"""The HTML page, opened in a real headless Chromium."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from support.browser import Page, browser, needs_chromium
from support.command_line import succeeded
from support.report_experiment import ExperimentFolder, metrics, settings
from support.rows import step_row

from asyncpp_cli.runs.status import State, Status

ROWS = 3000
SPIKE = 1234
HOSTILE = "<img src=x onerror=console.error(1)>"


TIMELINE = {
    "first_step": 2998,
    "steps": 2,
    "steps_kept": 1.0,
    "ranks": [
        [["0B5998@2999", 0, 200_000], ["0U3000", 200_000, 210_000]],
        [["1F5999@2999", 100_000, 300_000], ["1B5999@2999", 300_000, 700_000], ["1U3000", 700_000, 710_000]],
    ],
}


def long_run(seed: int, delay: int) -> list[dict[str, Any]]:
    """Enough steps to be thinned, with a spike and a hole in them."""
    start, *_, segment, evaluation, end = metrics(val_losses=(4.0, 2.0 + delay / 8 + seed / 100), delay=delay)
    segment |= {"first_step": 0, "steps": ROWS}
    evaluation["step"] = end["step"] = ROWS
    segment["action_seconds"] = {"F": [0.1, 0.2], "B": [0.2, 0.4], "U": [0.01, 0.01]}
    if delay:
        load = {"blocks": [0, 1], "max_over_mean": [1.25, 1.5], "entropy": [0.9, 0.9], "never_chosen": [0, 0]}
        segment["experts"] = load
    losses = {77: math.nan, SPIKE: 9.5}
    steps = [
        step_row(step)
        | {"tokens": 2048 * step, "train_loss": losses.get(step, 2 + 3 / step), "seconds": 0.25 * step}
        | {"lr": 1e-3, "grad_norm": 1.0, "skipped": step == 77}
        for step in range(1, ROWS + 1)
    ]
    return [start, *steps, segment, evaluation, end]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of three arms, one of them with HTML for a name, beside its experiment."""
    folder = tmp_path_factory.mktemp("page")
    experiment = ExperimentFolder(folder / "experiment", name=HOSTILE)
    for place, (schedule, name) in enumerate((("1f1b", "plain"), ("2bw", "plain"), ("1f1b", HOSTILE))):
        for seed in range(2):
            experiment.add(
                settings(schedule, "muon", seed=seed, **{"data.path": name, "train.steps": ROWS}),
                rows=long_run(seed, place % 2),
                status=Status(state=State.COMPLETED, attempt=1, step=ROWS, steps=ROWS),
                axes={"data.path": name},
                timeline=TIMELINE,
            )
    succeeded("report", experiment.folder, "--format", "html", "--out", folder / "page.html")
    return folder / "page.html"


def test_the_page_is_small_and_links_to_the_runs(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert len(text.encode()) < 3e6
    links = re.findall(r'href="([^"]*)"', text)
    inside = [link for link in links if link.startswith("experiment/")]
    assert len(inside) == 6
    assert all((written.parent / link).is_dir() for link in inside)


LOSS = "document.getElementById('loss-chart')"


def traces(page: Page) -> list[dict[str, Any]]:
    """Opacity, number of points, last and highest of each line of the loss chart."""
    found: list[dict[str, Any]] = page.value(
        f"{LOSS}.data.map(t => ({{opacity: t.opacity ?? 1, points: t.x.length, last: t.x[t.x.length - 1],"
        " top: Math.max(...t.y.filter(v => v !== null))}))"
    )
    return found


def click(page: Page, *selectors: str) -> None:
    for selector in selectors:
        page.value(f"document.querySelector({selector!r}).click()")


def texts(page: Page, selector: str) -> list[str]:
    return page.value(f"[...document.querySelectorAll({selector!r})].map(each => each.textContent)")


@needs_chromium
def test_it_says_nothing_to_the_console_and_asks_for_nothing(page: Page, written: Path) -> None:
    assert page.messages == []
    asked = [address for address in page.requests if not address.startswith("data:")]
    assert asked == [written.absolute().as_uri()]


@needs_chromium
def test_arms_with_several_seeds_are_a_mean_in_a_band(page: Page) -> None:
    """At each point of the line: half the sum of the two losses, and their distance over root 2."""
    assert page.value(f"{LOSS}.data.length") == 9
    click(page, '[data-seeds="single"]')
    first, second = page.value(f"{LOSS}.data.filter(t => (t.opacity ?? 1) === 1).slice(0, 2).map(t => t.y)")
    click(page, '[data-seeds="band"]')
    low, high, mean = page.value(f"{LOSS}.data.slice(0, 3).map(t => t.y)")
    pairs = list(zip(first, second, strict=True))
    assert mean == pytest.approx([(a + b) / 2 for a, b in pairs])
    widths = [b - a for a, b in zip(low, high, strict=True)]
    assert widths == pytest.approx([2 * abs(a - b) / math.sqrt(2) for a, b in pairs])
    click(page, '[data-seeds="single"]')  # what follows looks at single runs
    assert page.messages == []


@needs_chromium
def test_curves_are_there_thinned_with_their_extremes(page: Page) -> None:
    found = traces(page)
    raw = [trace for trace in found if trace["opacity"] < 1]
    smooth = [trace for trace in found if trace["opacity"] == 1]
    assert (len(raw), len(smooth)) == (6, 6)
    assert all(trace["points"] < ROWS and trace["last"] == ROWS and trace["top"] == 9.5 for trace in raw)
    drawn = "[...document.querySelectorAll('#loss-chart .scatterlayer .trace')]"
    assert page.value(f"{drawn}.filter(trace => trace.querySelector('path')).length") == 12


@needs_chromium
def test_arms_axes_and_losses_can_be_switched(page: Page) -> None:
    def lasts() -> set[float]:
        return {trace["last"] for trace in traces(page) if trace["opacity"] < 1}

    click(page, '[data-arm="0"]')
    assert len(traces(page)) == 8
    assert page.value("document.getElementById('throughput-chart').data[0].x.length") == 2
    click(page, '[data-axis="tokens"]')
    assert lasts() == {ROWS * 2048}
    click(page, '[data-axis="seconds"]')
    assert lasts() == {12.5}  # 750 seconds, in minutes
    click(page, '[data-kind="val"]')
    assert [trace["points"] for trace in traces(page)] == [1] * 4
    click(page, '[data-range="end"]', '[data-kind="train"]')
    low, high = page.value(f"{LOSS}.layout.xaxis.range")
    assert (low, high) == (pytest.approx(6.25, rel=0.01), pytest.approx(12.5, rel=0.02))
    click(page, '[data-arm="0"]', '[data-axis="step"]', '[data-range="all"]')
    # The load of experts is a curve of the arms that have it.
    click(page, '[data-kind="load"]')
    assert [(trace["points"], trace["top"]) for trace in traces(page)] == [(1, 1.5), (1, 1.5)]
    click(page, '[data-kind="train"]')
    assert len(traces(page)) == 12
    assert page.messages == []


@needs_chromium
def test_rates_norms_and_speeds_are_curves_and_arms_are_pinned_and_coloured(page: Page) -> None:
    kinds = ["Training", "Validation", "Learning rate", "Gradient norm", "Tokens/s", "Load of experts"]
    assert texts(page, "[data-kind]") == kinds
    ends = f"{LOSS}.data.map(t => [t.x[t.x.length - 1], t.y[t.y.length - 1]])"
    for kind, value in (("lr", 1e-3), ("grad_norm", 1.0), ("speed", 1500.0)):
        click(page, f'[data-kind="{kind}"]')
        assert page.value(ends) == [[ROWS, value]] * 6, kind
    click(page, '[data-kind="train"]')
    arms = "document.querySelectorAll('#arm-list .arm')"
    first = page.value(f"{arms}[0].querySelector('span').textContent")
    page.value(f"{arms}[0].querySelector('.pin').click()")
    click(page, "#arm-list .buttons button:last-child")
    assert texts(page, "#arm-list label:not(.hidden-arm) span:first-of-type") == [first]
    click(page, "#arm-list .buttons button")
    assert page.value(f"{LOSS}.data.at(-1).text").startswith(first)
    assert page.value(f"{LOSS}.data.at(-1).line.width") == 4  # two more than a line on which none lies
    page.value(f"{arms}[0].querySelector('.pin').click()")
    colours = "[...document.querySelectorAll('#arm-list line')].map(line => line.getAttribute('stroke'))"
    choose = "(key => { const s = document.getElementById('colour'); s.value = key; "
    choose += "s.dispatchEvent(new Event('change')); })"
    page.value(f"{choose}('schedule')")
    plain, delayed, hostile = page.value(colours)
    assert plain == hostile != delayed
    bars = "document.getElementById('throughput-chart').data[0].marker.color"
    assert page.value(bars) == [plain, delayed, hostile]
    page.value(f"{choose}('')")
    assert page.messages == []


@needs_chromium
def test_smoothing_is_a_mean_and_leaves_the_raw_data_behind(page: Page) -> None:
    slide = (
        "(() => { const s = document.getElementById('smoothing'); s.value = %d; "
        "s.dispatchEvent(new Event('input')); "
        f"const y = {LOSS}.data[1].y.slice(-200); return Math.max(...y) - Math.min(...y); }})()"
    )
    rough, fine = page.value(slide % 0), page.value(slide % 20)
    assert fine < rough
    assert page.value(f"{LOSS}.data.filter(t => (t.opacity ?? 1) === 1)[0].y.length") > 100
    assert len(traces(page)) == 12


@needs_chromium
def test_every_chart_and_timeline_is_drawn(page: Page) -> None:
    assert page.value("document.querySelectorAll('#gap-chart .errorbar').length") == 1
    assert page.value("document.querySelectorAll('#busy-chart .hm').length") == 1
    assert page.value("document.getElementById('memory')") is None
    assert page.value("document.querySelectorAll('#load-chart .hm').length") == 1
    assert page.value("document.getElementById('load-chart').data[0].text") == [["1.25", "1.50"]]
    # Two programs, predicted and measured, on two ranks.
    assert page.value("document.querySelectorAll('svg.gantt .g-rank').length") == 8
    boxes = texts(page, "svg.gantt rect title")
    # The same five actions four times, and the measured ones at the times that the run wrote.
    assert len(boxes) == 4 * 5
    assert boxes.count("1B5999@2999: 0.3 to 0.7 s") == 2
    captions = texts(page, "#timelines figcaption")
    assert all("The last step before the drain after step 3000" in caption for caption in captions)
    assert page.value("document.images.length") == 0


@needs_chromium
def test_names_with_html_are_shown_as_they_are(page: Page) -> None:
    assert texts(page, "h1") == [HOSTILE]
    assert any(HOSTILE in arm for arm in texts(page, "#arm-list label"))
    assert any("<img" in row for row in texts(page, "#throughput-chart .ytick text"))


@needs_chromium
def test_it_is_dark_where_the_system_is(page: Page, written: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    chart = f"{LOSS}.layout.paper_bgcolor"
    assert (page.value(ground), page.value(chart)) == ("rgb(255, 255, 255)", "#fff")

    def prefer(scheme: str, colour: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.call("Emulation.setEmulatedMedia", features=features)
        # The page hears of it with its next frame.
        there = f"{chart} === '{colour}'"
        page.value(f"new Promise(r => {{ const see = () => {there} ? r(0) : setTimeout(see, 20); see(); }})")

    prefer("dark", "#0d1117")
    assert page.value(ground) == "rgb(13, 17, 23)"
    page.value("window.dispatchEvent(new Event('beforeprint'))")
    assert page.value(chart) == "#fff"
    page.value("window.dispatchEvent(new Event('afterprint'))")
    assert page.value(chart) == "#0d1117"
    prefer("light", "#fff")
    assert page.value(ground) == "rgb(255, 255, 255)"


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_in_bars_and_fields_have_contrast(page: Page, written: Path, scheme: str) -> None:
    """4.5, as WCAG 2.1 asks of small text; in fields at both ends of the colour scale."""

    def luminance(colour: str) -> float:
        digits = colour.removeprefix("#")
        digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
        parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.open(written)
    bars = "document.getElementById('throughput-chart').data[0]"
    fields = "document.getElementById('busy-chart')"
    pairs = page.value(
        f"{bars}.marker.color.map((back, place) => [{bars}.insidetextfont.color[place], back])"
    )
    pairs += page.value(
        f"{fields}.layout.coloraxis.colorscale.map(([, back]) => [{fields}.data[0].textfont.color, back])"
    )
    page.call("Emulation.setEmulatedMedia", features=[])
    assert len(pairs) == 5
    for pair in pairs:
        low, high = sorted(map(luminance, pair))
        assert (high + 0.05) / (low + 0.05) >= 4.5, pair


@needs_chromium
def test_a_table_wider_than_paper_is_printed_smaller(page: Page) -> None:
    """All else keeps its size: a browser would make the whole page smaller."""
    width = "document.querySelector('#table table').getBoundingClientRect().width"
    page.value("document.querySelector('#table table').style.minWidth = '2000px'")
    page.value("window.dispatchEvent(new Event('beforeprint'))")
    assert 600 < page.value(width) < 700
    page.value("window.dispatchEvent(new Event('afterprint'))")
    assert page.value(width) == 2000
    page.value("document.querySelector('#table table').style.minWidth = ''")


def titles(page: Page, *, within: tuple[int, int] = (9999, 9999)) -> list[str]:
    """The beginnings of the table's titles that are shown on a screen of this size."""
    shown = page.value(
        "[...document.querySelectorAll('#table thead th')].filter(th => th.offsetParent).map(th => "
        "[th.textContent, th.getBoundingClientRect().right, th.getBoundingClientRect().bottom])"
    )
    return [text[:6] for text, right, bottom in shown if right <= within[0] and bottom <= within[1]]


@needs_chromium
@pytest.mark.parametrize(
    ("width", "seen"), [(390, {"val lo", "gap(de"}), (1400, {"val lo", "gap(de", "× sync"})]
)
def test_a_page_shows_the_main_columns_alone_until_it_is_asked(
    page: Page, written: Path, width: int, seen: set[str]
) -> None:
    """A phone shows loss and gap on its first screen."""
    page.open(written, width=width, height=844)
    assert seen <= set(titles(page, within=(width, 844)))
    others = {"perple", "unigra", "skippe"}
    assert not others & set(titles(page))
    click(page, "#every-column")
    assert others <= set(titles(page))


@needs_chromium
@pytest.mark.slow
def test_it_fits_a_phone_and_prints(page: Page, written: Path, tmp_path: Path) -> None:
    page.open(written, width=390, height=800)
    assert page.value("document.documentElement.scrollWidth") <= 390
    widths = page.value("[...document.querySelectorAll('.chart .main-svg')].map(s => s.clientWidth)")
    assert widths
    assert max(widths) <= 390
    page.value(f"window.drawn = new Promise(r => {LOSS}.on('plotly_relayout', r)); 0")
    page.call("Emulation.setDeviceMetricsOverride", width=700, height=800, deviceScaleFactor=1, mobile=False)
    page.value("window.drawn.then(() => 0)")
    charts = "[...document.querySelectorAll('.chart')].filter(c => c.querySelector('.main-svg'))"
    rooms = page.value(f"{charts}.map(c => [c.clientHeight, c.querySelector('.main-svg').clientHeight])")
    assert len(rooms) == 5
    assert all(room >= drawn for room, drawn in rooms)
    page.print(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert page.messages == []


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of 20 cells: four schedules at five rates, two of them synchronous and with the same losses."""
    folder = tmp_path_factory.mktemp("many")
    experiment = ExperimentFolder(folder / "experiment", name="rates")
    for schedule, coefficient in (("1f1b", 0.0), ("gpipe", 0.0), ("2bw", 0.0), ("2bw", 1.0)):
        for place in range(5):
            rate = round(0.001 * 2**place, 4)
            delay = int(schedule == "2bw")
            loss = 2.0 + 0.05 * (place - 2) ** 2 + (0.3 - 0.1 * coefficient) * delay
            experiment.add(
                settings(schedule, "muon", coefficient, **{"optimizer.lr": rate}),
                rows=metrics(val_losses=(4.0, loss), delay=delay),
                axes={"optimizer.lr": rate},
            )
    for name in ("page.html", "other.html"):
        written = folder / name
        assets = ["--assets", folder / "shared"]
        succeeded("report", experiment.folder, "--format", "html", "--out", written, *assets)
    return folder / "page.html"


@needs_chromium
def test_many_arms_are_shown_by_the_best_of_each_and_their_table_can_be_searched(
    many: Path, tmp_path: Path
) -> None:
    with browser(tmp_path) as page:
        page.open(many, width=800)
        best = texts(page, "#arm-list label:not(.hidden-arm) span:first-of-type")
        assert best == ["1f1b muon lr 0.004", "2bw muon EF lr 0.004", "2bw muon lr 0.004"]
        assert "The best of each arm, 3 of 20" in texts(page, "#arm-list")[0]
        # Both synchronous schedules: the lower line is wider than the upper one.
        page.value("document.querySelectorAll('#arm-list input[type=checkbox]')[3].click()")
        click(page, '[data-kind="val"]')
        widths = page.value(f"{LOSS}.data.map(t => [t.text, t.line.width])")
        chosen = {text.partition(",")[0]: width for text, width in widths if width > 1}
        assert chosen["1f1b muon lr 0.004"] > chosen["gpipe muon lr 0.004"] == chosen["2bw muon lr 0.004"]
        first = "document.querySelector('#table tbody').rows[0].textContent"
        loss = (
            "[...document.querySelectorAll('#table th')].find(cell => cell.textContent.includes('val loss'))"
        )
        page.value(f"{loss}.click()")
        assert "2.000" in page.value(first)
        page.value(f"{loss}.click()")
        assert "2.500" in page.value(first)
        page.value(
            "(() => { const box = document.querySelector('#table .filter'); box.value = '2BW 0.016';"
            " box.dispatchEvent(new Event('input')); })()"
        )
        rows = "[...document.querySelector('#table tbody').rows].filter(row => !row.hidden)"
        assert page.value(f"{rows}.length") == 2
        assert re.search(r"\d+ more columns to the right", texts(page, ".hint")[0])
        page.open(many, width=2400)
        assert texts(page, ".hint") == [""]
        assert page.messages == []


def test_pages_share_the_script_of_the_charts(many: Path) -> None:
    [script] = (many.parent / "shared").iterdir()
    for page in (many, many.with_name("other.html")):
        assert f'<script src="shared/{script.name}"></script>' in page.read_text(encoding="utf-8")
        assert page.stat().st_size < 200_000
