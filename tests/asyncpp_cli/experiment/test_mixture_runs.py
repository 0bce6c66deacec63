"""`data.sources` and `data.weights`: from the template to the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import succeeded
from support.launches import train_all
from support.report_experiment import cells_of, report_of

from asyncpp_cli.runs.experiment_folder import open_experiment

TEMPLATE = """
matrix: {schedule: [2bw], optimizer: [sgd], data.weights.wiki: [1, 3], seed: [0]}
model: micro
schedule.microbatches: 2
data:
  context: 16
  sources: {wiki: wiki.txt, code: code}
  validation: {held: held.txt}
train: {steps: 2, microbatch_size: 2, eval_microbatches: 2, eval_interval: 2}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: None) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("wiki.txt").write_text("an encyclopedia of pipelines " * 40)
    Path("held.txt").write_text("what nobody trains on " * 40)
    Path("code").mkdir()
    Path("code/a.py").write_text("def stage(x): return x + 1\n" * 40)
    Path("mine.yaml").write_text(TEMPLATE)
    return tmp_path


def ids(experiment: str) -> list[str]:
    return [cell.id for cell in open_experiment(Path(experiment)).cells]


@pytest.mark.slow
def test_weights_are_an_axis_and_the_report_says_the_shares(folder: Path) -> None:
    succeeded("sweep", "mine.yaml", "--out", "e")
    train_all("e")
    assert [cell["data.weights.wiki"] for cell in cells_of(folder / "e")] == [1.0, 3.0]
    [line] = [line for line in report_of(folder / "e").conditions if line.startswith("Shares of the sources")]
    even, uneven = line.removeprefix("Shares of the sources in sequences: ").split("; or ")
    tokens = "code 0.5 (1,026 tokens), wiki 0.5 (1,102 tokens)"
    assert even == tokens
    assert uneven == tokens.replace("code 0.5", "code 0.25").replace("wiki 0.5", "wiki 0.75")
    first = ids("e")[0]
    succeeded("sweep", "mine.yaml", "data.weights.code=1.0", "--out", "same")
    assert ids("same") == ids("e")
    succeeded("export", f"e/{first}", "--out", "weights")
    assert Path("weights/tokenizer.json").exists()
