"""What a run trains on: the same for every attempt and every seed, wherever it lies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.command_line import asyncpp, refusal, succeeded
from support.files import ROOT
from support.launches import train_all
from support.report_experiment import cells_of, report_of
from support.texts import prepared, some_documents, write_lines, write_tokenizer

from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.experiment.run_data import locations
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.status import State

TEXTS = ROOT / "tests" / "support" / "prose"

DATA = {
    "data.path": "{path: texts, context: 16, validation_share: 0.3}",
    "data.validation.wiki": (
        "{path: texts, context: 16, validation_share: 0.3, validation: {wiki: wiki.txt, code: code}}"
    ),
    "data.sources.wiki": (
        "{context: 16, sources: {wiki: wiki.txt, code: code}, validation: {held: held.txt}}"
    ),
}
"""By the key of what is copied, moved and changed."""

TEMPLATE = """
matrix: {schedule: [1f1b], optimizer: [sgd], seed: [0, 1]}
model: micro
schedule.microbatches: 2
train: {steps: 2, microbatch_size: 2, eval_microbatches: 1}
data: """


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: None) -> Path:
    """A folder to type commands in, with a template and its texts."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TEXTS, tmp_path / "texts")
    Path("wiki.txt").write_text("an encyclopedia of pipelines " * 40)
    Path("held.txt").write_text("what nobody trains on " * 40)
    Path("code").mkdir()
    Path("code/a.py").write_text("def stage(x): return x + 1\n" * 40)
    Path("mine.yaml").write_text(TEMPLATE + DATA["data.path"])
    return tmp_path


def ids(experiment: Path) -> list[str]:
    return [cell.id for cell in open_experiment(experiment).cells]


@pytest.fixture(params=DATA)
def key(folder: Path, request: pytest.FixtureRequest) -> str:
    """A template whose data, at this key, lie at `here`."""
    key: str = request.param
    moved = "texts" if key == "data.path" else "wiki.txt"
    shutil.move(moved, "here")
    (folder / "mine.yaml").write_text(TEMPLATE + DATA[key].replace(moved, "here"))
    return key


def other_words(place: str) -> None:
    file = Path(place, "0.txt") if Path(place).is_dir() else Path(place)
    file.write_text("other words " * 99)


@pytest.mark.slow
def test_the_same_data_elsewhere_makes_the_same_runs(key: str) -> None:
    succeeded("sweep", "mine.yaml", "--out", "a")
    (shutil.copytree if Path("here").is_dir() else shutil.copy)("here", "copy")
    succeeded("sweep", "mine.yaml", f"{key}=copy", "--out", "b")
    assert ids(Path("a")) == ids(Path("b"))
    other_words("copy")
    succeeded("sweep", "mine.yaml", f"{key}=copy", "--out", "c")
    assert not set(ids(Path("a"))) & set(ids(Path("c")))


@pytest.mark.slow
def test_moved_data_is_found_where_the_user_says_it_went_and_changed_data_refused(
    folder: Path, key: str
) -> None:
    succeeded("sweep", "mine.yaml", "--out", "e")
    shutil.move("here", "there")
    said = refusal("launch", "e", "--replay")
    assert f"{key}: " in said
    assert "here does not exist" in said
    assert "holds other data" in refusal("data", "moved", "e", "mine.yaml")
    ended = succeeded("data", "moved", "e", "there")
    assert "2 runs" in ended.errors + ended.output
    train_all("e")
    changed = "there" if key == "data.path" else "code"
    other_words(changed if key == "data.path" else "code/a.py")
    said = refusal("sweep", "mine.yaml", f"{key}=there", "--out", "e")
    assert f"{folder}/{changed} has changed since the runs of e were made" in said
    assert "holds other data than the run was made for" in refusal(
        "train", f"e/{ids(Path('e'))[0]}", "--replay"
    )


@pytest.mark.slow
def test_sweeping_again_with_the_new_place_says_so_too(folder: Path) -> None:
    succeeded("sweep", "mine.yaml", "matrix.data.path=[texts]", "--out", "e")
    before = ids(Path("e"))
    shutil.move("texts", "new-place")
    changes = ["matrix.data.path=[new-place]", "matrix.seed=[0,1,2]"]
    ended = succeeded("sweep", "mine.yaml", *changes, "--out", "e")
    assert "1 runs added to the 2" in ended.errors + ended.output
    assert ids(Path("e"))[:2] == before
    train_all("e")


@pytest.mark.slow
def test_changed_data_is_refused_by_a_launch_a_resumed_run_and_another_seed(folder: Path) -> None:
    succeeded("sweep", "mine.yaml", "matrix.seed=[0]", "--out", "e")
    [run] = open_experiment(Path("e")).runs
    held = (folder / "texts" / "0.txt").read_text()
    (folder / "texts" / "0.txt").write_text(held.replace("pipeline", "Pipeline"))
    for command in (["launch", "e", "--replay"], ["train", run.folder, "--replay"]):
        said = refusal(*command)
        assert "texts holds other data than the run was made for" in said
    assert run.status().state == State.PENDING
    said = refusal("sweep", "mine.yaml", "matrix.seed=[0,1]", "--out", "e")
    assert "has changed since the runs of e were made" in said
    assert ids(Path("e")) == [run.id]
    (folder / "texts" / "0.txt").write_text(held)
    train_all("e")


@pytest.mark.slow
def test_a_run_without_a_cache_splits_its_text_in_its_own_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("no folder")
    monkeypatch.setenv("ASYNCPP_CACHE", str(folder / "file" / "cache"))
    succeeded("sweep", "mine.yaml", "matrix.seed=[0]", "--out", "e")
    train_all("e")
    [run] = open_experiment(Path("e")).runs
    assert run.status().state == State.COMPLETED
    assert len(list((run.folder / "text").glob("bytes-*/manifest.json"))) == 1


@pytest.mark.slow
def test_the_report_names_the_data(folder: Path) -> None:
    succeeded("sweep", "mine.yaml", "--out", "e")
    train_all("e")
    data = open_experiment(Path("e")).runs[0].config().data
    assert data.sha256 is not None
    assert f"Data: SHA-256 {data.sha256}" in asyncpp("report", "e", "--format", "markdown").output
    [cell] = json.loads(asyncpp("report", "e", "--format", "json").output)
    assert cell["conditions"]["corpus_sha256"] == data.sha256


@pytest.mark.slow
def test_weights_are_an_axis_and_the_report_says_the_shares(folder: Path) -> None:
    Path("mine.yaml").write_text(TEMPLATE + DATA["data.sources.wiki"])
    weights = ["matrix.data.weights.wiki=[1,3]", "matrix.seed=[0]"]
    succeeded("sweep", "mine.yaml", *weights, "--out", "e")
    train_all("e")
    assert [cell["data.weights.wiki"] for cell in cells_of(folder / "e")] == [1.0, 3.0]
    [line] = [line for line in report_of(folder / "e").conditions if line.startswith("Shares of the sources")]
    even, uneven = line.removeprefix("Shares of the sources in sequences: ").split("; or ")
    tokens = "code 0.5 (1,026 tokens), wiki 0.5 (1,102 tokens)"
    assert even == tokens
    assert uneven == tokens.replace("code 0.5", "code 0.25").replace("wiki 0.5", "wiki 0.75")
    succeeded("sweep", "mine.yaml", *weights, "data.weights.code=1.0", "--out", "same")
    assert ids(Path("same")) == ids(Path("e"))
    succeeded("export", f"e/{ids(Path('e'))[0]}", "--out", "weights")
    assert Path("weights/tokenizer.json").exists()


@pytest.mark.slow
def test_another_python_is_refused_but_has_the_same_ids(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ["data.path=null", "matrix.seed=[0]"]
    succeeded("sweep", "mine.yaml", *changes, "--out", "e")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(folder / "texts"))
    for file in (folder / "texts").iterdir():
        file.rename(file.with_suffix(".py"))
    assert "holds other data than the run was made for" in refusal("launch", "e", "--replay")
    changes[1] = "matrix.seed=[0,1]"
    assert "another Python?" in refusal("sweep", "mine.yaml", *changes, "--out", "e")
    succeeded("sweep", "mine.yaml", *changes, "--out", "f")
    assert ids(Path("f"))[0] == ids(Path("e"))[0]


@pytest.mark.parametrize(
    "content", ['{"moved": 3}', '{"moved": {"texts": 3}}', "{", '{"format": 2, "moved": {}}']
)
def test_a_damaged_file_of_locations_is_refused_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(content)
    with pytest.raises(DamagedError, match=r"data\.json"):
        locations(tmp_path)
    assert locations(tmp_path / "none") == {}


@pytest.mark.slow
def test_the_type_of_tokens_is_no_part_of_an_id_but_what_they_are(folder: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 4000)
    for dtype in ("<u2", "<u4"):
        tokens.astype(dtype).tofile(f"{dtype[1:]}.bin")
    shutil.copy("u4.bin", "other.bin")
    assert "accepted: data.dtype: uint32" in refusal("sweep", "mine.yaml", "data.path=u4.bin", "--out", "c")
    for out, path, options in (
        ("a", "u2.bin", []),
        ("b", "u2.bin", ["data.dtype=uint16"]),
        ("c", "u4.bin", ["data.dtype=uint32", "data.validation.other=other.bin"]),
    ):
        succeeded("sweep", "mine.yaml", "matrix.seed=[0]", f"data.path={path}", *options, "--out", out)
    assert ids(Path("a")) == ids(Path("b"))
    shutil.move("u4.bin", "moved.bin")
    assert "1 runs" in succeeded("data", "moved", "c", "moved.bin").errors
    assert "3,800" in succeeded("data", "inspect", "moved.bin", "--dtype", "uint32").output
    assert "accepted: auto, uint8" in refusal("data", "inspect", "moved.bin", "--dtype", "uint64")


MEANINGLESS = {
    "data.validation.wiki": [
        ("data.validation.data=wiki.txt", "data.validation.data: accepted as a name"),
        ("data.validation.wiki=nowhere.txt", "data.validation.wiki: "),
        ("data.validation.wiki=[3]", "data.validation.wiki takes one value"),
        ("data.validation.=wiki.txt", "takes one set by name: data.validation.NAME"),
        ("data.validation.wiki=texts", "is trained on (data.path)"),
        ("data.validation.wiki=tiny.txt", "tiny.txt has 3 tokens, one sequence needs 17"),
        ("data.validation.wiki=bpe", "was made with another tokenizer"),
        ("data.validation_sha256.wiki=12ab", "data.validation.wiki holds other data"),
        ("data.headline=books", "data.headline: 'books' is not known; accepted: data, wiki, code"),
        ("train.eval_tokens=100", "train.eval_microbatches: is 1, and train.eval_tokens says"),
        ("train.eval_tokens=0", "train.eval_tokens: is 0, must be at least 1"),
    ],
    "data.sources.wiki": [
        ("data.path=wiki.txt", "data.path: does not go with data.sources; accepted with it: null"),
        ("data.sources.wiki=nowhere.txt", "data.sources.wiki: "),
        ("data.sources.wiki=[3]", "data.sources.wiki takes one value"),
        ("data.sources.=wiki.txt", "takes one source by name: data.sources.NAME"),
        ("data.sources={wiki: wiki.txt}", "data.sources is a section; accepted: one of its keys at a time"),
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
}


@pytest.mark.parametrize(
    ("given", "change", "said"),
    [(given, *case) for given, cases in MEANINGLESS.items() for case in cases],
)
def test_what_has_no_meaning_is_refused_in_one_line(folder: Path, given: str, change: str, said: str) -> None:
    (folder / "mine.yaml").write_text(TEMPLATE + DATA[given])
    check_data_refused(folder, change, said)


def check_data_refused(folder: Path, change: str, said: str) -> None:
    """A change of `mine.yaml` in the working folder is refused in a line, before anything is written.

    It may name `tiny.txt`, which is too short, and `bpe`, which has another tokenizer.
    """
    Path("tiny.txt").write_text("abc")
    if change.endswith("bpe"):
        write_tokenizer(folder / "tokenizer.json")
        write_lines(folder / "documents.jsonl", some_documents(60))
        prepared(
            "documents.jsonl", "--tokenizer", "tokenizer.json", "--validation-share", "0.3", out=Path("bpe")
        )
    ended = asyncpp("sweep", "mine.yaml", change, "--out", "e")
    assert ended.code == 2
    last = ended.errors.strip().splitlines()[-1]
    assert said in last, ended.errors
    assert not Path("e").exists()
