"""Actions and programs as text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from support.schedule_cases import programs

from schedules import Action, Op, ScheduleError, build, parse_action
from schedules.io.program_file import from_text, to_text

TEXT = to_text(build("2bw", stages=2, microbatches=2, steps=1))


def test_actions_print_as_the_design_has_them():
    assert str(Action(0, Op.FORWARD, 5, 3)) == "0F5@3"
    assert str(parse_action("12W345@67")) == "12W345@67"
    assert parse_action("0U4") == Action(0, Op.UPDATE, -1, 4)


@pytest.mark.parametrize("text", ["", "0F5", "F5@3", "0X5@3", "0U4@1", "0U", "-1F0@0", "0F5@3 1F5@3"])
def test_malformed_actions_are_refused(text):
    with pytest.raises(ValueError, match="is not an action; one looks like"):
        parse_action(text)


@settings(deadline=None, max_examples=60)
@given(programs(max_stages=6, max_microbatches=8))
def test_a_program_comes_back_as_it_was_written(program):
    assert from_text(to_text(program), file="x") == program


def test_the_text_is_readable():
    assert TEXT.splitlines()[-2:] == [
        "rank 0: 0F0@0 0F1@0 0B0@0 0B1@0 0U1",
        "rank 1: 1F0@0 1B0@0 1F1@0 1B1@0 1U1",
    ]


def test_comments_and_empty_lines_are_left_out():
    commented = "# mine\n\n" + TEXT.replace("steps: 1", "steps: 1   # one")
    assert from_text(commented, file="x") == from_text(TEXT, file="x")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "asyncpp program, format 1",
            "asyncpp program, format 2",
            "x, line 1: a program begins with the line",
        ),
        ("steps: 1\n", "", "x: the line 'steps: ...' is missing"),
        ("steps: 1", "steps: one", "x, line 5: steps takes whole numbers of 0 or more, not 'one'"),
        ("steps: 1", "steps: 1 2", "x, line 5: steps takes one whole number, not 2"),
        ("steps: 1", "steps: 1\nsteps: 1", "x, line 6: steps is given twice"),
        ("steps: 1", "stages: 2", "x, line 5: expected 'rank R: ACTIONS' or 'KEY: VALUE'"),
        ("rank 1:", "rank 2:", "x, line 11: the line of rank 1 is due, and this is rank 2"),
        ("steps: 1", "steps: " + "9" * 5000, "x, line 5: steps takes whole numbers of 0 or more, not '999"),
        ("0B1@0", "0B1@" + "9" * 5000, "x, line 10, action 3: '0B1@999"),
        ("0B1@0", "0B1", "x, line 10, action 3: '0B1' is not an action"),
    ],
)
def test_a_damaged_file_is_refused_by_its_line(old, new, message):
    assert old in TEXT
    with pytest.raises(ScheduleError) as caught:
        from_text(TEXT.replace(old, new), file="x")
    assert message in str(caught.value)


def test_an_empty_file_is_refused():
    with pytest.raises(ScheduleError, match="x: empty"):
        from_text("\n# nothing\n", file="x")
