"""`data.sources` and `data.weights`: from the template to the report."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.command_line import refusal, succeeded
from support.launches import train_all
from support.report_experiment import cells_of, report_of
from support.texts import check_data_refused

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
    succeeded("export", f"e/{first}", "--out", "weights")
    assert Path("weights/tokenizer.json").exists()


def test_ids_name_what_the_sources_hold_and_not_where(folder: Path) -> None:
    succeeded("sweep", "mine.yaml", "--out", "a")
    shutil.copy("wiki.txt", "copy.txt")
    succeeded("sweep", "mine.yaml", "data.sources.wiki=copy.txt", "--out", "b")
    assert ids("a") == ids("b")
    succeeded("sweep", "mine.yaml", "data.weights.code=1.0", "--out", "c")
    assert ids("a") == ids("c")
    Path("copy.txt").write_text("other words " * 99)
    succeeded("sweep", "mine.yaml", "data.sources.wiki=copy.txt", "--out", "d")
    assert not set(ids("a")) & set(ids("d"))


@pytest.mark.slow
def test_a_moved_source_is_found_and_a_changed_one_refused(folder: Path) -> None:
    succeeded("sweep", "mine.yaml", "--out", "e")
    shutil.move("wiki.txt", "elsewhere.txt")
    assert "data.sources.wiki: " in refusal("launch", "e", "--replay")
    assert "holds other data" in refusal("data", "moved", "e", "mine.yaml")
    said = succeeded("data", "moved", "e", "elsewhere.txt")
    assert "2 runs" in said.output + said.errors
    train_all("e")
    Path("code/a.py").write_text("other words " * 99)
    said_of_changed = refusal("sweep", "mine.yaml", "data.sources.wiki=elsewhere.txt", "--out", "e")
    assert f"{folder}/code has changed since the runs of e were made" in said_of_changed
    assert "holds other data than the run was made for" in refusal("train", f"e/{ids('e')[0]}", "--replay")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.path=wiki.txt", "data.path: does not go with data.sources; accepted with it: null"),
        ("data.sources.wiki=nowhere.txt", "data.sources.wiki: "),
        ("data.sources.wiki=[3]", "data.sources.wiki takes one value"),
        ("data.sources.=wiki.txt", "takes one source by name: data.sources.NAME"),
        ("data.sources.wiki=tiny.txt", "data.sources.wiki: the train split of"),
        ("data.sources.wiki=bpe", "was made with another tokenizer"),
        ("data.sources._x=wiki.txt", "data.sources._x: accepted as a name"),
        ("data.weights.books=1", "data.weights.books: data.sources has no books"),
        ("data.weights.code=0", "data.weights.code: is 0; accepted: above 0, at most 1e+09"),
        ("data.weights.code=-1", "data.weights.code: is -1; accepted: above 0"),
        ("data.weights.code=2e9", "data.weights.code: is 2e+09; accepted: above 0"),
        ("data.weights.code=.inf", "data.weights.code: must be a finite number"),
        ("data.weights.code=much", "data.weights.code: must be a number or null"),
        ("data.weights.code=true", "data.weights.code: must be a number or null"),
        ("data.validation.held=code", "is trained on (data.sources.code); accepted: data that is not"),
        ("data.sha256=12ab", "holds other data"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(folder: Path, change: str, said: str) -> None:
    check_data_refused(folder, change, said)
