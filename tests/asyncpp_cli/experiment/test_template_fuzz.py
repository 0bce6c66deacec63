"""Whatever a template or an override says: it is refused in one line, or every cell of it can be trained."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import asyncpp

from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.settings import KEYS, SECTIONS
from optimizers import CORRECTIONS
from optimizers import NAMES as OPTIMIZERS
from schedules import NAMES as SCHEDULES
from stages.resolve.checks import check

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_here")]

BASE: dict[str, Any] = {
    "matrix": {"schedule": ["2bw"], "optimizer": ["adamw"]},
    "model": "micro",
    "schedule.microbatches": 2,
    "data": {"path": "texts", "context": 16},
    "train": {"steps": 2, "microbatch_size": 2},
}
NUMBERS = [-1, 0, 1, 2, 3, 4, 8, 64, 10**7, 10**9, 2**63, -(2**63), 10**30]
FRACTIONS = [0.0, -0.0, 1e-320, 1e-8, 0.5, 0.999, 1.0, 1e9, 1e38, 1e300, -1e308, float("nan"), float("inf")]
WORDS = ["", " ", "???", "null", "a b", "${seed}", "../x", "a" * 300, "\x1b[2J", "\0", "é", "=1+1", "1:30"]
WORDS += [
    "${train.steps}",
    "${mul:2,${seed}}",
    "${oc.env:HOME}",
    "${variables.a}",
    "${.lr}",
    "${",
    "\\${seed}",
]
WORDS += ["!!int 3", "9" * 5000, "0x1F", "017", "1e400", "~nobody/x", "texts/0.txt", "{a: 1}", "[[0]]"]
JUNK = ["[", "{a: ", "&a ", "*a", "\t", "? ", "- ", "<<: "]
JUNK += [
    "---\n",
    "...\n",
    "\ufeff",
    "\u2028",
    "2001-99-99",
    "[" * 3000,
    "{a: " * 500,
    "${oc.env:HOME}",
    "!!int ",
]
NAMES = [*SCHEDULES, *OPTIMIZERS, *CORRECTIONS, "micro", "nano", "10b", "none", "cpu", "texts", "bfloat16"]

scalars = st.sampled_from([None, True, False, *NUMBERS, *FRACTIONS, *WORDS, *NAMES]) | st.integers(-5, 40)
values = (
    scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.sampled_from(WORDS), scalars, max_size=1)
)
own = ["matrix", "zip", "include", "exclude", "overrides", "name", "description", "variables", "base"]
keys = st.sampled_from([*KEYS, *KEYS, *SECTIONS, *own, "matrix.seed", "model.nothing", "", "a.b.c", "train."])
settings_ = st.dictionaries(keys, values, max_size=3)
templates = st.fixed_dictionaries(
    {},
    optional={
        "matrix": st.dictionaries(keys, values, max_size=2).map(lambda axes: {**BASE["matrix"], **axes}),
        "model": st.dictionaries(
            st.sampled_from(["base", "name", "layers", "width", "x"]), values, max_size=3
        ),
        "variables": st.dictionaries(st.sampled_from(["a", "b", "1"]), values, max_size=2),
        "zip": values | st.lists(st.dictionaries(keys, values, max_size=2), max_size=2),
        "include": values | st.lists(settings_, max_size=2),
        "exclude": values | st.lists(settings_, max_size=2),
        "overrides": values
        | st.lists(st.fixed_dictionaries({"set": settings_}, optional={"when": settings_}), max_size=2),
    },
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "texts").mkdir()
    for number in range(4):
        (folder / "texts" / f"{number}.txt").write_text(f"some words to train on, {number}; " * 60)
    return folder


def refused_or_trainable(text: str, changes: list[str]) -> None:
    Path("mine.yaml").write_text(text, encoding="utf-8")
    shutil.rmtree("out", ignore_errors=True)
    ended = asyncpp("sweep", "mine.yaml", *changes, "--out", "out")
    assert ended.code in (0, 2), ended
    if ended.code == 2:
        for line in ended.errors.splitlines():
            assert line.startswith("asyncpp: error: "), ended.errors
            assert line.isprintable(), repr(line)
        assert not Path("out").exists()
        return
    seen: dict[Any, Any] = {}
    for run in open_experiment(Path("out")).runs:
        check(run.config(), seen=seen)


@pytest.fixture
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ASYNCPP_CACHE", str(folder / "cache"))


@settings(max_examples=30)
@given(template=templates, more=settings_)
def test_any_template(template: dict[str, Any], more: dict[str, Any]) -> None:
    refused_or_trainable(yaml.safe_dump({**BASE, **template, **more}, allow_unicode=True), [])


@settings(max_examples=30)
@given(changes=st.lists(st.tuples(keys, values.map(str) | st.text(max_size=12)), min_size=1, max_size=3))
def test_any_override(changes: list[tuple[str, str]]) -> None:
    refused_or_trainable(yaml.safe_dump(BASE), [f"{key}={value}" for key, value in changes])


@settings(max_examples=30)
@given(
    place=st.integers(0, 150),
    junk=st.text(max_size=6) | st.sampled_from(JUNK),
)
def test_any_text(place: int, junk: str) -> None:
    text = yaml.safe_dump(BASE)
    refused_or_trainable(text[:place] + junk.encode(errors="replace").decode() + text[place:], [])
