"""`asyncpp optimizers`: for people and for scripts."""

from __future__ import annotations

import json

from support.command_line import refusal, succeeded

from optimizers import CORRECTIONS, METHODS


def test_list_as_json() -> None:
    ended = succeeded("optimizers", "list", "--json")
    assert ended.errors == ""
    rows = {row["name"]: row for row in json.loads(ended.output)}
    assert rows.keys() == METHODS.keys()
    assert rows["muon"]["state_bytes_per_parameter"] == 4
    assert rows["adamw"]["state_bytes_per_parameter"] == 8
    assert rows["basis-rotation"]["reference"] == "arXiv 2602.03515"
    assert rows["nadamw"]["defaults"]["beta1"] == 0.99


def test_list_names_every_optimizer_and_correction_with_its_paper() -> None:
    ended = succeeded("optimizers", "list")
    starts = [line.split() for line in ended.output.splitlines()]
    for entry in [*METHODS.values(), *CORRECTIONS.values()]:
        (line,) = [words for words in starts if words[:1] == [entry.name]]
        assert line[1] == f"{entry.state_bytes_per_parameter:g}"
        assert entry.reference.split()[-1] in line
    assert "momentum=0.95" in ended.output
    assert "optimizers show NAME" in ended.errors


def test_show_gives_rules_and_settings() -> None:
    ended = succeeded("optimizers", "show", "muon")
    assert "Set by optimizer.name: muon" in ended.output
    assert "embedding   adamw  no" in ended.output
    assert "scale               match-rms      match-rms | original" in ended.output


def test_show_gives_a_corrections_settings() -> None:
    ended = succeeded("optimizers", "show", "weight-prediction")
    assert "flavour  last-update  last-update | momentum | adam-moments" in ended.output
    assert "Set by correction.name: weight-prediction" in ended.output
    buffered = succeeded("optimizers", "show", "error-feedback-buffered").output
    assert "Set by error_feedback.coefficient and error_feedback.form: buffered" in buffered


def test_an_unknown_optimizer_is_one_line() -> None:
    assert "'moun' is not known; did you mean muon? accepted: sgd, adamw" in refusal(
        "optimizers", "show", "moun"
    )
