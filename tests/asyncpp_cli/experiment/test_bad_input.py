"""What a user can get wrong: one line naming file and key, exit code 2, and nothing written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.command_line import asyncpp, refusal, succeeded

from asyncpp_cli.experiment.yaml_data import parse_value, read_mapping
from stages.config.records import DamagedError

GOOD = """
matrix: {schedule: 2bw, optimizer: adamw}
model: micro
schedule.microbatches: 2
train.steps: 3
"""


ADDED = [
    ("train.stepz: 3", ["train.stepz", "did you mean train.steps"]),
    ("trian: {steps: 3}", ["trian.steps", "did you mean train.steps"]),
    ("model.tide: true", ["model.tide: unknown key; did you mean model.tied"]),
    ("train.microbatches: 4", ["did you mean"]),
    ("frobnicate: 3", ["frobnicate", "accepted", "parallel", "overrides"]),
    ("optimizer.lr: fast", ["optimizer.lr", "must be a number", "fast"]),
    ("train: 3", ["train", "is a section"]),
    ("train: {steps: 10}", ["train.steps", "given twice"]),
    ("zip: {optimizer: [muon]}", ["zip: optimizer", "already"]),
    ("data.path: '???'", ["data.path", '"???" stands for no value']),
    ("train.eval_interval: 1:30", ["train.eval_interval: 1:30", "minutes and seconds", "quotes"]),
    ("optimizer.warmup: 017", ["optimizer.warmup: 017", "base eight, 15"]),
    ("optimizer.lr: ${train.stepz}", ["optimizer.lr: ${train.stepz}", "did you mean train.steps"]),
    ("optimizer.lr: ${optimizer.lr}", ["optimizer.lr", "refers to itself"]),
    ("optimizer: {lr: '${.beta1}', beta1: '${.lr}'}", ["optimizer.lr", "refers to itself"]),
    ("optimizer.lr: ${oc.env:ASYNCPP_NO_SUCH}", ["the environment variable ASYNCPP_NO_SUCH is not set"]),
    ("optimizer.lr: ${oc.create:1}", ["oc.create", "accepted: oc.env, oc.decode, oc.select, mul, div"]),
    ("optimizer.lr: ${mul:a,2}", ["optimizer.lr", "'a' is not a number"]),
    ("optimizer.lr: ${div:1,0}", ["optimizer.lr", "division by zero"]),
    ("optimizer.lr: ${div:1}", ["optimizer.lr", "two numbers"]),
    ("optimizer.lr: ${model}", ["optimizer.lr", "model is a section"]),
    ("optimizer.lr: ${variables.a}\nvariables: {b: 1}", ["variables.a is not set; in variables: b"]),
    ("optimizer.lr: ${oc.env:HOME}", ["optimizer.lr", "must be a number", "${oc.env:HOME}"]),
    ("optimizer.lr: '${seed'", ["not accepted"]),
    ("variables: {a: {b: 1}}", ["variables.a"]),
    ("base: mine.yaml", ["base", "starts from itself"]),
    ("exclude: [{model: {base: nano}}]", ["exclude[0]", "model", "name"]),
    ("name: &a [*a]", ["100,000"]),
    ("base: no-such.yaml", ["experiment template no-such.yaml does not exist; accepted: "]),
    ("overides: [{set: {seed: 1}}]", ["mine.yaml: overides: unknown key; did you mean overrides?"]),
    ("overrides: [{when: {schedul: 2bw}, set: {seed: 1}}]", ["overrides[0].when", "schedul"]),
    ("overrides: [{when: {matrix.seed: 1}, set: {seed: 1}}]", ["overrides[0].when", "matrix.seed"]),
    (
        "overrides: [{when: {schedule: [1f1b, 2bww]}, set: {seed: 1}}]",
        ["overrides[0].when: schedule.name: '2bww' is not known; did you mean 2bw?"],
    ),
    ("exclude: [{model: nanoo}]", ["exclude[0]: model", "did you mean nano?"]),
    ("exclude: [{optimizer.lr: fast}]", ["exclude[0]: optimizer.lr: must be a number"]),
    ("overrides: [{when: {schedule: 2bw}}]", ["overrides[0]", "set"]),
    ("exclude: [{}]", ["exclude[0]"]),
    ("exclude: [{schedule: 2bw}]", ["no cell left"]),
    ("include: 3", ["include", "list"]),
    ("zip: {seed: [1, 2], optimizer.lr: [1]}", ["zip", "seed 2, optimizer.lr 1"]),
    ("name: [1]", ["name", "text"]),
    ("parallel.stages: 5\nschedule.delay: 2", ["parallel.stages", "5"]),
]
"""What is added to a good template, and words of the answer."""

CHANGED = [
    ("optimizer=adamv", ["optimizer.name", "adamv", "did you mean adamw?", "muon"]),
    ("correction.name=error-feedback", ["is set by error_feedback.coefficient", "weight-prediction"]),
    ("model=huge", ["command line: model: model template 'huge' is not known", "nano", "135m"]),
    ("matrix.model=[nano,huge]", ["command line: matrix: model: model template 'huge'"]),
    ("matrix.seed=[0,0]", ["same run"]),
    ("data.path=", ["data.path", "no value", "null"]),
    ("data.path=/tmp #1", ["data.path", "comment", "quotes"]),
    ("base=nano", ["base", "file"]),
    ("model={layers: 2}", ["model.width is not set"]),
    ("model={base: nano, layerz: 2}", ["model.layerz", "did you mean model.layers"]),
    ("model={base: nanoo}", ["did you mean nano"]),
    ("train.stepz=3", ["error: command line: train.stepz: unknown key; did you mean train.steps"]),
    ("matrix.seed=[]", ["seed", "no values"]),
    ("model=no/such.yaml", ["model: model template no/such.yaml does not exist"]),
    ("exclude=[{optimizer: adamv}]", ["exclude[0]: optimizer.name", "did you mean adamw?"]),
    ("train.steps", ["train.steps", "KEY=VALUE"]),
    ("train.steps=[1", ["train.steps", "not YAML"]),
    ("seed=[0,1]", ["matrix.seed"]),
    ("train.steps=!!python/name:os.system", ["train.steps", "tag"]),
]
"""What is changed of the quickstart."""

TEXTS = [
    ("a: [1", ["not YAML"]),
    ("- 1", ["mapping"]),
    ("seed: 1\nseed: 2", ["duplicate"]),
    ("<<: {seed: 1, seed: 2}", ["duplicate"]),
    ("name: !!python/object/apply:os.system ['touch hacked']", ["tag"]),
    ("3: 4", ["not text"]),
    ("a: \x00", ["not YAML"]),
    (
        "{model: micro, train: {steps: 3}, parallel: {stages: 2}, schedule.microbatches: 4, matrix: "
        "{schedule: [1f1b, 2bw], optimizer: [adamw, muon], seed: [0, 1, 2], "
        "optimizer.decay_share: [null, 0.1]}}",
        ["(12 cells; first schedule=1f1b, optimizer=adamw"],
    ),
    (GOOD.replace("model: micro\n", ""), ["model is not set; accepted: ", "micro"]),
]
"""Whole templates."""

UNTRAINABLE = [
    ("x", [], ["one sequence needs 129"]),
    ("some text " * 20, ["data.context=100"], ["the validation split of"]),
    ("some text " * 200, ["seed=340282366920938463463374607431768211456"], ["fits into 64 bits"]),
    ("some text " * 200, ["model.layers=10000000"], ["is 10,000,000, must be at most 10,000"]),
]
"""The text to train on, changes of the quickstart."""

OF_HYDRA = [
    (["-m", "train.steps=30,40"], ["-m: several values are an axis, as in 'matrix.train.steps=[30,40]'"]),
    (["train.steps=30,40"], ["several values are an axis: 'matrix.train.steps=[30,40]'"]),
    (["+a.b=3"], ["a.b: unknown key; accepted: schedule, optimizer"]),
    (["~a.b=3"], ["to remove a setting write ~a.b, without a value"]),
    (["~train.step"], ["does not set train.step; did you mean ~train.steps?"]),
]


@pytest.mark.parametrize(
    ("content", "changes", "named"),
    [
        *((GOOD + added, [], named) for added, named in ADDED),
        *((text, [], named) for text, named in TEXTS),
        *(("base: quickstart", [change], named) for change, named in CHANGED),
        *(("base: quickstart", words, named) for words, named in OF_HYDRA),
        (GOOD, ["matrix.error_feedback=true", "schedule=1f1b"], ["error_feedback", "1f1b"]),
    ],
)
def test_a_mistake_is_refused_by_file_and_key(
    content: str, changes: list[str], named: list[str], tmp_path: Path
) -> None:
    template = tmp_path / "mine.yaml"
    template.write_text(content)
    message = refusal("sweep", template, *changes, "--out", tmp_path / "out")
    for words in named if changes else (str(template), *named):
        assert words in message
    assert list(tmp_path.iterdir()) == [template]


@pytest.mark.parametrize(("text", "changes", "named"), UNTRAINABLE)
def test_untrainable_cells_are_refused_before_anything_is_written(
    text: str, changes: list[str], named: list[str], tmp_path: Path, own_cache: None
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(text)
    (says,) = named
    assert says in refusal("sweep", "quickstart", f"data.path={file}", *changes, "--out", tmp_path / "e")
    assert not (tmp_path / "e").exists()


def test_the_mistakes_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "{model: nanoo, matrix: {schedule: [1f1b, 2wb], seed: [0, x]}, exclude: [{sed: 1}], "
        "train: {steps: 3.5, stepz: 30, microbatch_size: 0, precision: bfloat}, optimizer.schedule: cosin}"
    )
    named = [
        "did you mean nano?",
        "schedule.name: '2wb' is not known; did you mean 2bw?",
        "matrix: seed: must be",
        "exclude[0]: sed: unknown key",
        "train.steps: must be",
        "train.stepz: unknown key; did you mean train.steps?",
        "train.microbatch_size: is 0, must be at least 1",
        "train.precision: 'bfloat' is not known; did you mean bfloat16?",
        "optimizer.schedule: 'cosin' is not known; did you mean cosine?",
        "optimizer is not set; accepted: sgd, adamw",
    ]
    said = refusal("sweep", file, "--list", remarks=len(named) - 1)
    assert [words for words in named if words not in said] == []


def test_an_unknown_template_is_refused_with_those_there_are(tmp_path: Path) -> None:
    assert "sweep quickstart model=7b" in refusal("sweep", "7b", "--list")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert str(binary) in refusal("sweep", binary, "--out", tmp_path / "out")
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, says in (
        ("pipe.yaml", "is not a regular file"),
        ("", "is a folder"),
        ("x", "does not exist"),
    ):
        assert f"{tmp_path / name} {says}" in refusal("sweep", tmp_path / name, "--list")
    with pytest.raises(DamagedError, match="not a regular file"):
        read_mapping(tmp_path / "pipe.yaml")


@pytest.mark.slow
def test_launch_and_train_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    experiment = tmp_path / "experiment"
    succeeded("sweep", "quickstart", "--out", experiment)
    assert "names 6 runs; accepted: one run" in refusal("train", experiment)
    run = min((experiment / "runs").iterdir())
    assert "torchrun" in refusal("train", run)
    assert not (run / "attempts").exists()


def test_launch_refuses_a_gpu_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    experiment = tmp_path / "experiment"
    succeeded("sweep", "quickstart", "site.device=cuda", "--out", experiment)
    assert "site.device is cuda, but there are no GPUs here; accepted: auto, cpu" in refusal(
        "launch", experiment
    )


def test_numbers_are_read_as_a_person_means_them() -> None:
    meant = {"7": 7, "007": 7, "00": 0, "1e3": 1000.0, "0.5": 0.5, "'017'": "017", "'1:30'": "1:30"}
    meant |= {"a#b": "a#b", "'a #b'": "a #b", "2001": 2001, "null": None, "host:30": "host:30"}
    assert {text: parse_value(text, where="key=") for text in meant} == meant


def test_a_correction_that_changes_nothing_is_told(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "{model: micro, optimizer: adamw, train: {steps: 3, clip: stage}, correction.name: lr-discount, "
        "matrix: {schedule: [2bw, pipedream], parallel.stages: [2, 3]}, schedule.microbatches: 4}"
    )
    done = succeeded("sweep", file, "--list", "schedule.microbatches=4")
    # pipedream's delay is p - 1 at its first stage.
    assert "and 2 more: correction lr-discount divides" in done.errors
    told = asyncpp("sweep", file, "--list", "matrix.schedule=[pipedream]", "matrix.parallel.stages=[3]")
    assert "lr-discount" not in told.errors


def test_a_template_may_have_thousands_of_values(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"{{model: micro, matrix: {{schedule: [1f1b], seed: {list(range(12_000))}}}}}")
    assert len(read_mapping(file)["matrix"]["seed"]) == 12_000
