"""`asyncpp schedule` as a person and a script use it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support import rows as rows_support
from support.command_line import asyncpp
from support.files import ROOT
from typer.testing import CliRunner, Result

from asyncpp_cli.base.errors import DamagedError, UserError, refusal_of
from asyncpp_cli.main import app
from asyncpp_cli.schedule_tools.options import Geometry
from schedules import NAMES, OPTIONS, build, verify
from schedules.io.program_file import from_text, to_text

KEYS = {
    *(
        "schedule",
        "bubble",
        "step_time",
        "segment_steps",
        "segment_step_time",
        "delay_max",
        "mismatch_max",
        "versions_max",
        "activations_max",
    ),
    "drain_time",
}


NO_TIME = ("--forward", "0", "--input", "0", "--weight", "0")


def invoked(*words: str) -> Result:
    """`asyncpp schedule WORDS`, which must succeed."""
    result = CliRunner().invoke(app, ["schedule", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def run(*words: str) -> str:
    """What it writes to standard output."""
    return invoked(*words).stdout


def rows(*words: str) -> list[dict[str, Any]]:
    return json.loads(run(*words, "--json"))


def refusal(*words: str) -> str:
    """The message with which `asyncpp schedule WORDS` is refused."""
    with pytest.raises((UserError, DamagedError, OSError)) as caught:
        run(*words)
    return refusal_of(caught.value).message


def geometry(stages: int, microbatches: int) -> tuple[str, ...]:
    return "--stages", str(stages), "--microbatches", str(microbatches)


def test_list_has_the_whole_family_and_leaves_out_what_the_numbers_do_not_allow():
    assert [row["schedule"] for row in rows("list")] == list(NAMES)
    table = run("list", *geometry(8, 16))
    assert max(len(line) for line in table.splitlines()) <= 90
    assert [name for name in NAMES if f"{name}: " not in table] == []
    result = invoked("list", *geometry(4, 9), "--json")
    names = [row["schedule"] for row in json.loads(result.stdout)]
    assert names == [name for name in NAMES if name != "interleaved-1f1b"]
    assert "interleaved-1f1b is left out: interleaved-1f1b has rounds of" in result.stderr


def test_compare_writes_what_scripts_rely_on():
    words = ("--chunks", "2", "--forward", "1")
    found = rows("compare", "1f1b", "interleaved-1f1b", "2bw", *geometry(4, 8), *words)
    assert all(row.keys() >= KEYS for row in found)
    assert [row["bubble"] for row in found] == pytest.approx([3 / 11, 3 / 19, 0])
    expected = {"step_time": 24, "delay_max": 1, "mismatch_max": 0, "versions_max": 2}
    assert found[2] | expected | {"activations_max": 4, "drain_time": 9} == found[2]
    # With the halves of a split backward.
    times = ("--forward", "1", "--input", "1", "--weight", "1")
    found = rows("compare", "1f1b", "zero-bubble", *geometry(4, 8), *times)
    assert [row["bubble"] * row["step_time"] for row in found] == pytest.approx([9, 3])
    table = run("compare", "1f1b", "2bw", *geometry(4, 8))
    assert ("27.3 %" in table, "0.0 %" in table) == (True, True)


@pytest.mark.parametrize(
    "times",
    [
        ("--forward", "1.2"),
        ("--forward", "1", "--input", "1.3", "--weight", "0.8", "--split"),
        ("--forward", "0.6", "--split", "--ahead", "2", "--latency", "0.4"),
    ],
)
def test_the_order_of_a_v_is_made_for_the_times_that_are_given(times):
    [row] = rows("compare", "2bw-v", *geometry(8, 32), *times)
    assert row["bubble"] == pytest.approx(0, abs=1e-9)


def test_compare_takes_costs_of_messages_and_updates():
    def step_time(*words):
        return rows("compare", "2bw", *geometry(4, 8), *words)[0]["step_time"]

    plain = step_time()
    assert step_time("--latency", "0.5") > plain
    assert step_time("--update", "2") == plain + 2
    assert step_time("--reduction", "30") > plain
    assert step_time("--latency", "0.5", "--ahead", "2") == plain


@pytest.mark.parametrize(
    ("stages", "microbatches", "step", "bubble"), [(4, 1, "4.5", "33.3 %"), (16, 4, "21", "42.9 %")]
)
def test_few_microbatches_in_a_deep_pipeline_settle_late(stages, microbatches, step, bubble):
    asked = ("2bw", *geometry(stages, microbatches))
    table = run("compare", *asked)
    assert table.splitlines()[2].split()[:4] == ["2bw", *bubble.split(), step]
    [row] = rows("compare", *asked)
    own = row["segment_step_time"]
    said = f"2bw: a step takes {step} in the long run, {own:.4g} in a segment of 16 steps"
    assert own < 0.99 * row["step_time"]
    assert said in table
    assert said in run("show", *asked)
    # A longer segment is nearer to it.
    [longer] = rows("compare", *asked, "--steps", "100")
    assert own < longer["segment_step_time"] < longer["step_time"] == row["step_time"]
    assert "in the long run" not in run("compare", *asked, "--steps", "300")


def test_what_settles_at_once_has_one_time():
    assert "in the long run" not in run("compare", "1f1b", "2bw", "2bw-v", "paci-v", *geometry(4, 8))
    assert "a step takes 33, idle for 27.3 %" in run("show", "1f1b", *geometry(4, 8))


def write_run(folder: Path, rows: list[dict[str, Any]]) -> str:
    """A run's folder with these metrics; of its configuration only the presence counts here."""
    folder.mkdir()
    (folder / "config.yaml").write_text("{}")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


START = {"kind": "start", "step": 0, "microbatches": 4, "rank_of_stage": [0, 1]}


def test_compare_takes_the_times_that_a_run_measured(tmp_path):
    segment = rows_support.segment(busy=[0.9, 0.8]).plain()
    run_folder = write_run(
        tmp_path / "run",
        [
            START,
            {**segment, "steps": 3, "action_seconds": {"F": [1.0, 2.0], "B": [2.0, 3.0], "U": [1.0, 0.5]}},
            {**segment, "steps": 1, "action_seconds": {"F": [5.0, 2.0], "B": [6.0, 3.0], "U": [1.0, 0.5]}},
        ],
    )
    [row] = rows("compare", "2bw", "--costs-of", run_folder)
    # By steps: rank 0 takes 2 + 3 for a micro-batch and 1 for the update, rank 1 takes 2 + 3 and 0.5.
    assert (row["stages"], row["microbatches"]) == (2, 4)
    assert row["step_time"] == pytest.approx(4 * 5 + 1)
    assert "3 ranks, and 2 of them were measured" in refusal(
        "compare", "2bw", "--stages", "3", "--costs-of", run_folder
    )
    assert "leave out --forward" in refusal("compare", "2bw", "--costs-of", run_folder, "--forward", "2")
    run_folder = write_run(tmp_path / "unmeasured", [START])
    assert "no segment of it was measured" in refusal("compare", "2bw", "--costs-of", run_folder)
    assert "no such experiment or run" in refusal("compare", "2bw", "--costs-of", str(tmp_path))


def test_show_is_a_chart_of_80_columns_with_a_table():
    shown = run("show", "2bw", *geometry(4, 8))
    chart, table = shown.split("F forward")
    assert max(len(line) for line in chart.splitlines()) <= 80
    assert "rank 3 ..................F0@0" in chart
    assert "delay" in table
    assert "\x1b" not in shown


def test_show_writes_the_program_as_json():
    content = json.loads(run("show", "2bw", *geometry(2, 2), "--steps", "3", "--json"))
    head = {"schedule": "2bw", "stages": 2, "microbatches": 2, "steps": 3}
    assert content | head == content
    assert content["ranks"][1][:5] == ["1F0@0", "1B0@0", "1F1@0", "1B1@0", "1U1"]
    assert content["analysis"]["delay_max"] == [1, 1]
    assert content["analysis"]["versions"] == [2, 2]


def test_show_has_shards_of_a_head():
    shown = run("show", "2bw", *geometry(2, 4), "--shard-head")
    assert "2S0@0" in shown
    assert "a step takes 24, idle for 0.0 %" in shown


def test_too_few_microbatches_for_a_delay_of_1_are_said():
    result = invoked("show", "2bw", *geometry(8, 2))
    said = "2bw: a delay of 1 needs 7 micro-batches per step on 8 ranks; the smallest delay with 2 is 4"
    assert (said in result.stderr, "a delay of 1 needs" in result.stdout) == (True, False)


def test_check_accepts_what_export_writes(tmp_path):
    file = tmp_path / "program.txt"
    run("export", "pipedream", *geometry(3, 4), "--out", str(file))
    assert from_text(file.read_text(), file="x") == build("pipedream", stages=3, microbatches=4, steps=1)
    said = "valid (pipedream, 3 stages on 3 ranks, 4 micro-batches per step, 1 step)"
    assert said in run("check", str(file))
    assert run("show", str(file)).startswith("pipedream: 3 stages")


def test_check_names_everything_that_is_wrong_and_exits_with_2(tmp_path):
    file = tmp_path / "program.txt"
    text = to_text(build("1f1b", stages=2, microbatches=2, steps=1))
    file.write_text(text.replace("0B1@0 ", "").replace("1U1", "1U3"))
    result = CliRunner().invoke(app, ["schedule", "check", str(file)])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"{file}: stage 0 never performs the backward of micro-batch 1" in result.stderr
    assert f"{file}: 1U3 writes version 3 where 1 is due" in result.stderr
    assert "(and 3 more)" in refusal("show", str(file))


def test_a_file_is_compared_where_its_middle_repeats(tmp_path):
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    for file, steps in (long, 4), (short, 2):
        run("export", "zero-bubble", *geometry(4, 8), "--steps", str(steps), "--out", str(file))
    of_file, of_name = rows("compare", str(long), "zero-bubble", *geometry(4, 8))
    assert of_file == of_name
    assert "middle of its 2 steps does not repeat; write the file with more steps" in refusal(
        "compare", str(short)
    )
    assert "a step takes" not in run("show", str(short))


def test_export_writes_torchs_csv():
    written = run("export", "1f1b", *geometry(2, 2), "--format", "csv")
    assert written.splitlines() == ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]
    assert "no run (DIR/RUN)" in refusal("export", "1f1b", *geometry(2, 2), "--format", "trace")


def test_draw_writes_a_picture(tmp_path):
    run("draw", "1f1b", "2bw", *geometry(2, 4), "--out", str(tmp_path / "x.svg"))
    assert "</svg>" in (tmp_path / "x.svg").read_text()


def test_the_program_on_the_page_is_right():
    (text,) = re.findall(
        r"```\n(asyncpp program, format 1\n.*?)```", (ROOT / "docs" / "schedules.md").read_text(), re.DOTALL
    )
    verify(from_text(text, file="x"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("show", "2bx", *geometry(2, 2)), "unknown schedule '2bx'; did you mean 2bw? accepted: gpipe, 1f1b"),
        (("show", "2bw"), "--stages is missing: 2bw needs --stages and --microbatches"),
        (("show", "2bw", "--stages", "2"), "--microbatches is missing"),
        (("show", "2bw", *geometry(4, 2), "--delay", "1"), "needs a delay of at least 2"),
        (("show", "1f1b", *geometry(4, 2), "--chunks", "2"), "--chunks 2: not an option of 1f1b"),
        (("compare", "interleaved-1f1b", *geometry(4, 9), "--chunks", "2"), "accepted: a multiple of 4"),
        (("compare", "2bw", *geometry(4, 4), "--forward", "-1"), "forward takes -1.0"),
        (("compare", "1f1b", *geometry(4, 4), "--forward", "1e308"), "accepted: 0 to 1e+100"),
        (("check", "no/such/file"), "no/such/file: No such file or directory"),
        (("export", "2bw", *geometry(2, 2), "--steps", "2", "--format", "csv"), "synchronous schedules only"),
        (("draw", "2bw", *geometry(2, 2), "--out", "x.gif"), "a picture is a file of .svg, .png, .pdf"),
        (("draw", "2bw", *geometry(2, 2), "--out", "no/such/x.svg"), "cannot be written"),
        (("export", "2bw", *geometry(2, 2), "--out", "no/such/x"), "cannot be written"),
        # What would take for ever, or show nothing.
        (("show", "2bw", *geometry(3000, 6000)), "108,000,000 actions; accepted: 2,000,000 at most"),
        (("compare", "1f1b", *geometry(1000, 1000)), "8,000,000 actions; accepted: 2,000,000 at most"),
        (("list", *geometry(3000, 3000)), "gpipe: 3,000 stages"),
        (("compare", "1f1b", *geometry(2, 2), "--steps", "1000000000000"), "1,000,000,000,000 steps"),
        (("draw", "1f1b", *geometry(2, 4), "--until", "-1", "--out", "x.svg"), "a picture of time 0 to -1"),
        (
            ("draw", "1f1b", *geometry(1, 1), *NO_TIME, "--out", "x.svg"),
            "0 to 0",
        ),
    ],
)
def test_mistakes_are_refused_in_one_line(words, message):
    said = refusal(*words)
    assert message in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("show", "2bw", *geometry(0, 2)), "--stages"),
        (("list", "--chunks", "0"), "--chunks"),
    ],
)
def test_a_count_below_1_is_refused(words, option):
    ended = asyncpp("schedule", *words)
    assert (ended.code, f"{option}: accepted: 1 or more" in ended.errors) == (2, True)


@pytest.fixture
def endless(tmp_path: Path) -> list[Path]:
    """Files whose reading does not end, or ends after gigabytes."""
    os.mkfifo(tmp_path / "pipe.txt")
    with (tmp_path / "huge.txt").open("wb") as huge:
        huge.truncate(1 << 40)
    return [Path("/dev/zero"), tmp_path / "pipe.txt", tmp_path / "huge.txt"]


@pytest.mark.parametrize("command", ["show", "check", "compare"])
def test_files_without_end_are_refused(command: str, endless: list[Path]) -> None:
    *unreadable, huge = (refusal(command, str(file)) for file in endless)
    assert all("not a regular file" in said for said in unreadable)
    assert "larger than 33,554,432 bytes" in huge


def test_a_header_too_large_is_refused(tmp_path: Path) -> None:
    text = run("export", "1f1b", *geometry(2, 2)).replace("steps: 1\n", f"steps: {10**12}\n")
    (tmp_path / "long.program").write_text(text)
    assert "2,000,000,000,000 micro-batches" in refusal("show", str(tmp_path / "long.program"))


def test_every_option_of_schedules_is_a_flag_but_those_that_follow_from_times():
    assert {field.name for field in fields(Geometry)} >= OPTIONS.keys() - {"costs"}
