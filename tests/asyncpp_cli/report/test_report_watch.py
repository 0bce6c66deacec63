"""The page that is rewritten while runs are training, and the one in the browser that follows it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.browser import Page, browser, needs_chromium
from support.command_line import ASYNCPP, refusal, succeeded
from support.report_experiment import ExperimentFolder, metrics, settings

from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.runs.status import State, Status


def running_experiment(folder: Path, *, cells: int = 1) -> Run:
    """An experiment of completed cells and one run that is yet to begin, which is returned."""
    experiment = ExperimentFolder(folder)
    for place in range(cells):
        rate = 0.001 * (place + 1)
        experiment.add(settings("1f1b", "muon", **{"optimizer.lr": rate}), axes={"optimizer.lr": rate})
    run = experiment.add(settings("2bw", "muon"), rows=[], status=Status(state=State.PENDING))
    run.metrics_file.write_text("")
    return run


def end(run: Run) -> None:
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in metrics(delay=1)))
    run.write_status(Status(state=State.COMPLETED, attempt=1, step=4, steps=4))


def reload_of(page: Path) -> float | None:
    """Seconds after which a page that is whole loads itself again."""
    text = page.read_text(encoding="utf-8")
    assert text.endswith("</html>\n")
    data = re.search(r'id="data">(.*)</script>', text)
    assert data is not None
    found: float | None = json.loads(data[1])["reload"]
    return found


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def test_the_page_is_rewritten_until_the_last_run_has_ended(tmp_path: Path) -> None:
    run = running_experiment(tmp_path / "trial")
    page = tmp_path / "trial" / "report.html"
    seen: list[float | None] = []

    def end_later() -> None:
        wait_for(page)
        seen.append(reload_of(page))
        page.unlink()
        wait_for(page)
        seen.append(reload_of(page))
        end(run)

    helper = threading.Thread(target=end_later)
    helper.start()
    said = succeeded("report", tmp_path / "trial", "--watch", "--watch-seconds", "0.1")
    helper.join()
    assert seen == [0.1, 0.1]
    assert reload_of(page) is None
    assert said.errors.count("Wrote ") == 2
    assert said.errors.endswith("All runs have ended\n")
    assert "2 completed" in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_ctrl_c_ends_it_and_leaves_the_page_whole(tmp_path: Path) -> None:
    running_experiment(tmp_path / "trial")
    page = tmp_path / "page.html"
    command = [*ASYNCPP, "report", tmp_path / "trial", "--watch", "--watch-seconds", "0.01", "--out", page]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(page)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert reload_of(page) == 0.01
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["page.html"]


def test_what_is_no_page_is_not_watched(tmp_path: Path) -> None:
    running_experiment(tmp_path / "trial")
    for wrong in (("--format", "json"), ("--out", "/dev/stdout"), ("--watch-seconds", "0")):
        assert wrong[0] in refusal("report", tmp_path / "trial", "--watch", *wrong)
    assert "does not exist" in refusal("report", tmp_path / "nowhere", "--watch")


VIEW = """(() => {
  const texts = (selector) => [...document.querySelectorAll(selector)].map(each => each.textContent);
  return {
  kind: document.querySelector('[data-kind][aria-pressed=true]').dataset.kind,
  scale: document.querySelector('[data-scale][aria-pressed=true]').dataset.scale,
  smoothing: document.querySelector('#controls output').value,
  shown: texts('#arm-list label:not(.hidden-arm) span:first-of-type'),
  pinned: texts('.arm:has(.pin[aria-pressed=true]) label span:first-of-type'),
  colours: [...document.querySelectorAll('#arm-list line')].map(line => line.getAttribute('stroke')),
  find: document.querySelector('#arm-list input[type=search]').value,
  rows: texts('#table tbody tr:not([hidden])').map(text => text.match(/0[.]0\\d+/)[0]),
  every: document.getElementById('every-column').checked,
  open: texts('details[open] summary'),
  zoom: document.getElementById('loss-chart')._fullLayout.xaxis.range,
  gap: document.getElementById('throughput-chart')._fullLayout.xaxis.range,
  scroll: Math.round(scrollY),
}; })()"""

CHOOSE = """(async () => {
  const type = (selector, text) => {
    const box = document.querySelector(selector);
    box.value = text;
    box.dispatchEvent(new Event('input', { bubbles: true }));
  };
  document.querySelector('[data-kind=val]').click();
  document.querySelector('[data-scale=log]').click();
  type('#smoothing', 7);
  document.querySelectorAll('#arm-list input[type=checkbox]')[1].click();
  document.querySelectorAll('#arm-list input[type=checkbox]')[13].click();
  document.querySelectorAll('.pin')[3].click();
  type('#arm-list input[type=search]', '1f1b');
  const colour = document.getElementById('colour');
  colour.value = 'schedule';
  colour.dispatchEvent(new Event('change', { bubbles: true }));
  type('#table .filter', '1f1b 0.01');
  document.querySelector('#table th').click();
  document.querySelector('#table th').click();
  document.getElementById('every-column').click();
  document.querySelector('#arms summary').click();
  await Plotly.relayout('loss-chart', { 'xaxis.range[0]': 1.5, 'xaxis.range[1]': 3.5 });
  await Plotly.relayout('throughput-chart', { 'xaxis.range': [100, 900] });
  const frame = () => new Promise(done => requestAnimationFrame(done));
  await frame();
  await frame();
  scrollTo(0, 500);
  await frame();
  await frame();
})()"""


LEGEND = """(() => {
  const chart = document.getElementById('over-optimizer.lr-chart');
  chart.scrollIntoView();
  window.clicked = new Promise(done => chart.on('plotly_legendclick', done));
  const box = chart.querySelector('.legendtoggle').getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2];
})()"""

HELD = """
const later = window.setTimeout;
window.setTimeout = (what, after) => (after === 30000 ? (window.after30Seconds = what) : later(what, after));
"""


@needs_chromium
def test_a_page_that_is_rewritten_reloads_itself_and_keeps_the_view(tmp_path: Path) -> None:
    """Until the experiment has ended; the address alone brings the same view."""
    run = running_experiment(tmp_path / "trial", cells=14)
    file = tmp_path / "page.html"
    report: tuple[Any, ...] = ("report", tmp_path / "trial", "--format", "html", "--out", file)

    def until(page: Page, condition: str) -> None:
        ready = False
        while not ready:
            time.sleep(0.05)
            with suppress(AssertionError):  # between two pages nothing answers
                ready = page.value(f"document.documentElement?.dataset.ready === 'yes' && ({condition})")

    def rewrite(*, reload: float | None) -> None:
        """As the command with `--watch` does."""
        succeeded(*report)
        text = file.read_text(encoding="utf-8").replace('"reload":null', f'"reload":{json.dumps(reload)}')
        file.write_text(text, encoding="utf-8")

    rewrite(reload=30)
    with browser(tmp_path / "profile") as page:
        page.call("Page.addScriptToEvaluateOnNewDocument", source=HELD)
        page.open(file)
        x, y = page.value(LEGEND)
        for event in ("mousePressed", "mouseReleased"):
            page.call("Input.dispatchMouseEvent", type=event, x=x, y=y, button="left", clickCount=1)
        page.value("window.clicked.then(() => 0)")
        page.value(CHOOSE)
        chosen = page.value(VIEW)
        assert chosen["kind"] == "val"
        assert (len(chosen["rows"]), len(chosen["open"]), chosen["every"]) == (5, 1, True)
        # A click in a legend hid the first arm; the fourth was pinned, which shows it.
        hidden = page.value("document.querySelector('.arm label.hidden-arm span').textContent")
        assert hidden == "1f1b muon lr 0.001"
        assert len(chosen["pinned"]) == 1
        assert set(chosen["pinned"]) < set(chosen["shown"])
        assert len(set(chosen["colours"])) == 2
        assert (chosen["zoom"], chosen["gap"], chosen["scroll"]) == ([1.5, 3.5], [100, 900], 500)
        end(run)
        rewrite(reload=None)
        page.value("void window.after30Seconds()")
        until(page, "document.querySelector('header p').textContent.includes('15 completed')")
        assert page.value(VIEW) == chosen
        assert page.value("window.after30Seconds === undefined")
        link = page.value("location.href")
        page.call("Page.navigate", url="about:blank")
        page.call("Page.navigate", url=link)
        until(page, "location.protocol === 'file:'")
        assert page.value(VIEW) == chosen
        assert page.messages == []
        asked = {address.partition("#")[0] for address in page.requests if not address.startswith("data:")}
        assert asked == {file.as_uri()}
