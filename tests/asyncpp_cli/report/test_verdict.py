"""Steps to a loss, and the verdict on time: known curves, coverage of the interval, and what is missing."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.attempts import submitted
from support.command_line import asyncpp, succeeded
from support.report_experiment import (
    ExperimentFolder,
    cells_of,
    charts_of_cells,
    metrics,
    quickstart_folder,
    report_of,
    run,
    settings,
)

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.costs.devices import find_device
from asyncpp_cli.planner.costs.roofline import Roofline
from asyncpp_cli.planner.layouts import CONSIDERED
from asyncpp_cli.planner.listing import listed as listing
from asyncpp_cli.planner.shared import Shared
from asyncpp_cli.report.analysis.aggregate import aggregate_best
from asyncpp_cli.report.analysis.cells import CellResult
from asyncpp_cli.report.analysis.planned import transfers
from asyncpp_cli.report.analysis.transfer import Target
from asyncpp_cli.report.analysis.verdict import (
    DOES_NOT_PAY,
    PAYS,
    UNDECIDED,
    time_by_loss,
    verdicts,
)
from asyncpp_cli.report.analysis.verdict_text import sentence, verdict_lines
from asyncpp_cli.report.load.run import RunResult
from asyncpp_cli.runs.experiment_folder import Experiment, open_experiment
from asyncpp_cli.runs.run_folder import Lineage
from asyncpp_cli.runs.status import State, Status
from schedules import is_synchronous
from stages.checkpoint.files import Owner
from stages.rows import Start


def curve(steps: float) -> float:
    """A loss that falls as a power of the steps."""
    return float(1.4 + 9 * steps**-0.35)


def lines_of(compared: Sequence[CellResult]) -> tuple[list[str], list[str]]:
    return verdict_lines(compared, verdicts(compared))


def averaged(runs: Sequence[RunResult]) -> list[CellResult]:
    return aggregate_best(runs, keys=["train.steps", "schedule.microbatches"])[0]


def cells(
    *, ratio: float, speed: float, seeds: Sequence[int] = (0, 1, 2, 3), noise: float = 1e-3
) -> list[CellResult]:
    """1f1b, a faster synchronous schedule, and 2bw in three lengths; `speed` is relative to the latter."""
    draw = np.random.default_rng(7)
    arms = [("1f1b", 1200, 1200, 1000.0), ("zb-v", 1200, 1200, 1250.0)]
    arms += [("2bw", steps, steps / ratio, 1250 * speed) for steps in (900, 1400, 2000)]
    runs = []
    for seed in seeds:
        for schedule, steps, as_many, of_arm in arms:
            loss = curve(as_many) + draw.normal(0, noise)
            measured = {"loss": loss, "speed": of_arm * math.exp(draw.normal(0, 1e-3))}
            runs.append(run(schedule, seed=seed, **measured, **{"train.steps": steps, "data.context": 128}))
    return averaged(runs)


Arm = tuple[str, int, float, float | None]
"""Schedule, steps, loss, and tokens per second."""
DELAYED: list[Arm] = [("2bw", steps, curve(steps), 1500.0) for steps in (900, 1200, 1500)]


def runs_of(arms: Sequence[Arm], **further: Any) -> list[RunResult]:
    """Runs of three seeds, whose losses and speeds differ by a little."""
    runs = []
    for seed in (0, 1, 2):
        for name, steps, loss, speed in arms:
            measured = {"loss": loss + 1e-3 * seed, "speed": speed and speed + seed}
            runs.append(run(name, seed=seed, **measured, **{"train.steps": steps}, **further))
    return runs


def test_the_time_is_that_of_the_fastest_synchronous_schedule() -> None:
    [verdict] = verdicts(cells(ratio=1.1, speed=1.3))
    assert (verdict.fastest.schedule, verdict.answer) == ("zb-v", PAYS)
    assert verdict.time == pytest.approx(1.1 / 1.3, rel=0.01)
    assert verdict.interval[0] < 1.1 / 1.3 < verdict.interval[1] < 1
    assert "Pays: 2bw muon reaches the loss of" in sentence(verdict)
    assert "zb-v" in sentence(verdict)
    # Where it takes more of the steps than it wins of the speed, it does not pay.
    [verdict] = verdicts(cells(ratio=1.1, speed=1.05))
    assert verdict.answer == DOES_NOT_PAY
    assert sentence(verdict).startswith("Does not pay: ")


@pytest.mark.parametrize(
    ("drawn", "remedy"),
    [
        ({"speed": 1.15, "seeds": (0, 1), "noise": 0.01}, r"Two seeds say little: `matrix.seed=\[0,1,2\]`"),
        # Those that were run stay; 0 and 1 may have chosen the settings.
        ({"speed": 1.15, "seeds": (2, 5), "noise": 0.01}, r"Two seeds say little: `matrix.seed=\[2,5,6\]`"),
        ({"speed": 1.12, "noise": 0.006}, r"About \d+ seeds would decide.*: `matrix.seed=\[0,1,2,3,"),
        # Without noise the curve alone leaves 1.09 to 1.11 open.
        (
            {"speed": 1.1, "noise": 1e-5},
            r"between the lengths.*: `matrix.train.steps=\[900,1200,13\d\d,1400,",
        ),
        ({"speed": 1.1, "noise": 0.05}, r"beyond the lengths.*: `matrix.train.steps=\[450,637,900,"),
    ],
)
def test_an_undecided_verdict_says_what_would_decide(drawn: dict[str, Any], remedy: str) -> None:
    [verdict] = verdicts(cells(ratio=1.1, **drawn))
    assert verdict.answer == UNDECIDED
    assert re.search(remedy, sentence(verdict)), sentence(verdict)


def with_losses(experiment: Experiment, *, failed: str = "", not_finite: str = "") -> None:
    """Metrics of completed runs, but for one that gave up, or ended at a loss that is not a number."""
    for run_of in experiment.runs:
        config = run_of.config()
        delay, steps = int(config.schedule.name == "2bw"), config.train.steps
        loss = curve(steps / (1 + 0.1 * delay)) + 1e-3 * config.seed
        if fnmatch(run_of.id, f"{not_finite}*" if not_finite else ""):
            loss = math.nan
        steady = [(1000 + 300 * delay + config.seed, 1.0)]
        rows = metrics(val_losses=[loss], steady=steady, busy=[(0.9, 0.9)], evaluated=[steps], delay=delay)
        state = State.COMPLETED
        if fnmatch(run_of.id, f"{failed}*" if failed else ""):
            state = State.FAILED
            rows = [row | {"skipped": True} if row["kind"] == "step" else row for row in rows[:-2]]
        run_of.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        run_of.write_status(Status(state=state, attempt=1, step=steps, steps=steps))


TEMPLATE = """
matrix: {schedule: [1f1b, 2bw], train.steps: [30, 40, 120], seed: [0, 1, 2]}
exclude: [{schedule: 1f1b, train.steps: [30, 120]}, {schedule: 2bw, train.steps: 40}]
optimizer: muon
model: nano
parallel: {stages: 2}
schedule: {microbatches: 2}
train: {microbatch_size: 8}
data: {context: 128}
"""


ONE_LENGTH = re.sub(r"train.steps: \[.*?\], |exclude: .*\n", "", TEMPLATE).replace(
    "train: {", "train: {steps: 40, "
)


TOO_FEW = ", {schedule: 2bw, train.steps: 40}"
"""What leaves two lengths, a factor of 4 apart."""


def test_the_command_that_is_named_makes_the_runs_that_answer(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(TEMPLATE)
    folder = tmp_path / "with space"
    succeeded("sweep", tmp_path / "mine.yaml", "--out", folder)
    with_losses(replace(open_experiment(folder), cells=open_experiment(folder).cells[:-1]))
    assert report_of(folder).summary[-1].endswith(f"not all runs are complete. `asyncpp launch '{folder}'`")
    with_losses(open_experiment(folder))
    [last] = report_of(folder).summary
    assert last.startswith("Not answered: whether 2bw muon reaches the loss of 1f1b muon (40 steps) sooner")
    command, launch = last.partition("`")[2].removesuffix("`").split(" && ")
    # As a shell splits it.
    assert shlex.split(command)[:2] == ["asyncpp", "sweep"]
    assert shlex.split(launch) == ["asyncpp", "launch", str(folder)]
    succeeded(*shlex.split(command)[1:])
    with_losses(open_experiment(folder))
    assert report_of(folder).summary[0].startswith("Pays: 2bw muon reaches the loss of 1f1b muon")


@pytest.mark.parametrize("site", ["", "gpus", "/home/other/gpus.yaml"])
def test_the_question_is_of_my_model_and_its_runs_count_towards_it(tmp_path: Path, site: str) -> None:
    """An experiment of one length names the commands that train two more of its own template, where its runs
    were; but no profile that is a file, which may be anybody's."""
    (tmp_path / "mine.yaml").write_text(ONE_LENGTH)
    folder = tmp_path / "with space"
    succeeded("sweep", tmp_path / "mine.yaml", "--out", folder)
    with_losses(open_experiment(folder))
    if site:
        experiment = open_experiment(folder)
        submitted(experiment, site=site, a=tuple(run.id for run in experiment.runs))
    last = report_of(folder).summary[-1]
    commands, answering = last.split("`")[1::2]
    sweep, launch = commands.split(" && ")
    succeeded(*shlex.split(sweep)[1:])
    _, _, launched, *options = shlex.split(launch)
    assert options == (["--site", "gpus"] if site == "gpus" else [])
    further = Path(launched)
    assert {run.config().train.steps for run in open_experiment(further).runs} == {20, 80}
    # While they train, what goes on with them is named.
    _, *both = shlex.split(answering)
    assert both == ["report", str(folder), str(further)]
    said = " ".join(succeeded(*both).output.split())
    assert f"not all runs are complete. `{launch}`" in said
    with_losses(open_experiment(further))
    assert "Pays: 2bw muon" in succeeded(*both).output


def test_gaps_of_few_seeds_name_the_command_that_adds_some(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(ONE_LENGTH.replace(", seed: [0, 1, 2]", ""))
    folder = tmp_path / "with space"
    succeeded("sweep", tmp_path / "mine.yaml", "--out", folder)
    with_losses(open_experiment(folder))
    [line] = [line for line in report_of(folder).summary if line.startswith("Certainty: ")]
    succeeded(*shlex.split(line.split("`")[1])[1:])
    with_losses(open_experiment(folder))
    assert {len(cell.losses) for cell in report_of(folder).cells} == {3}
    assert not any(line.startswith("Certainty: ") for line in report_of(folder).summary)


@pytest.mark.parametrize(
    ("how", "which", "seeds"),
    [
        ("failed", "2bw-muon-ef0-nano-s1-steps=55", "1 of 3 seeds (seed 1)"),
        ("not_finite", "2bw-muon-ef0-nano-s1-steps=55", "1 of 3 seeds (seed 1)"),
        ("failed", "1f1b-muon-ef0-nano-s2", "1 of 3 seeds (seed 2)"),
        # All seeds of a length that an answer could do without.
        ("failed", "2bw-muon-ef0-nano-s*-steps=65", "3 of 3 seeds (seed 0, 1, 2)"),
    ],
)
def test_an_arm_that_diverges_in_a_seed_is_no_mean_of_the_others(
    tmp_path: Path, how: str, which: str, seeds: str
) -> None:
    lengths = TEMPLATE.replace("30, 40, 120", "30, 40, 55, 65").replace("30, 120", "30, 55, 65")
    (tmp_path / "mine.yaml").write_text(lengths.replace(TOO_FEW, ""))
    succeeded("sweep", tmp_path / "mine.yaml", "--out", tmp_path / "mine")
    with_losses(open_experiment(tmp_path / "mine"))
    assert report_of(tmp_path / "mine").summary[0].startswith("Pays: ")
    with_losses(open_experiment(tmp_path / "mine"), **{how: which})
    summary = report_of(tmp_path / "mine").summary
    assert not any("Pays" in line for line in summary)
    assert f"diverged in {seeds}" in summary[-1]
    assert "lower its optimizer.lr" in summary[-1]
    assert ("the mean of the others" in summary[-1]) == (not seeds.startswith("3 of 3"))
    [diverged] = [line for line in summary if line.startswith("Diverged: ")]
    assert f"in {seeds[:12]}" in diverged
    assert ("those of the runs that are complete" in diverged) == (not seeds.startswith("3 of 3"))


def test_arms_without_lengths_or_synchronous_arms_have_no_answer(tmp_path: Path) -> None:
    compared = cells(ratio=1.1, speed=1.3)
    one_length = [cell for cell in compared if cell.synchronous or cell.axes.get("train.steps") == 2000]
    found, [line] = lines_of(one_length)
    assert found == []
    assert line.startswith("Not answered: ")
    assert "one length" in line
    assert "`asyncpp sweep verdict " in line
    # A report says first what was found.
    first, *_, last = report_of(quickstart_folder(tmp_path / "quickstart").folder).summary
    assert first.startswith("Loss: ")
    assert last.startswith("Not answered: ")
    found, [none] = lines_of([cell for cell in compared if not cell.synchronous])
    assert none.startswith("No verdict: no synchronous arm")
    assert lines_of([cell for cell in compared if cell.synchronous]) == ([], [])


@pytest.mark.parametrize("fastest", [None, 2500.0])
def test_a_doubled_synchronous_batch_is_a_choice_as_well(fastest: float | None) -> None:
    """Its time is compared in tokens, with the synchronous arm of the batch that is delayed, at the fastest
    schedule of each. Runs for their speed count neither in the loss nor as lengths."""
    twice = {"schedule.microbatches": 4}
    lengths = [("1f1b", steps, curve(2 * steps), 1500.0) for steps in (450, 600, 750)]
    runs = runs_of([("1f1b", 1200, curve(1200), 1000.0), *DELAYED])
    runs += [replace(each, id=f"{each.id}-twice") for each in runs_of(lengths, **twice)]
    for speed, suffix, further in ((1250.0, "", {}), (fastest, "-twice", twice)) if fastest else ():
        for each in runs_of([("zb-v", 100, math.nan, speed)], **further):
            giver = f"1f1b-{each.value('seed')}{suffix}"
            runs.append(replace(each, id=each.id + suffix, loss_of=giver, val_loss=None))
    larger = next(verdict for verdict in verdicts(averaged(runs)) if verdict.delayed.synchronous)
    assert larger.speed.ratio == pytest.approx(fastest / 1250 if fastest else 1.5, rel=1e-3)
    # Twice the sequences per step in 450 to 750 steps are 900 to 1,500 steps of the smaller batch.
    assert larger.steps.ratio == pytest.approx(1, rel=1e-3)
    assert [cell.schedule for cell in larger.lengths] == ["1f1b"] * 3
    hours = time_by_loss(larger)[larger.delayed.arm]
    assert all(math.isfinite(loss) for _, losses in hours for loss in losses)


def test_the_sentence_names_fsdp_and_what_else_it_was_measured_against() -> None:
    """And twice the batch, which has a sentence of its own, against the same arms."""
    sharded = [("1f1b", 1200, curve(1200), 1000.0), ("fsdp", 1200, curve(1200), 1100.0)]
    runs = runs_of([*sharded, *DELAYED])
    twice = runs_of(
        [("1f1b", steps, curve(2 * steps), 1050.0) for steps in (450, 600, 750)],
        **{"schedule.microbatches": 4},
    )
    runs += [replace(each, id=f"{each.id}-twice") for each in twice]
    sentences, _ = lines_of(averaged(runs))
    [delayed] = [sentence for sentence in sentences if "2bw muon reaches" in sentence]
    [larger] = [sentence for sentence in sentences if "2bw" not in sentence]
    among = "synchronous schedule that was run, fsdp (over 1f1b, fsdp as measured here)"
    assert among in delayed
    assert among in larger
    assert delayed.startswith("Pays: ")
    pipelines = verdicts(averaged(runs_of([sharded[0], *DELAYED])))
    assert not any("as measured here" in sentence(verdict) for verdict in pipelines)


def test_throughput_is_relative_to_the_fastest_synchronous_schedule() -> None:
    """Of any number of steps: a few are enough for a speed."""
    sync, fastest, delayed, _ = averaged(
        [
            run("1f1b", speed=1000.0, **{"train.steps": 1200}),
            run("zb-v", speed=1250.0, **{"train.steps": 100}),
            run("2bw", speed=1500.0, **{"train.steps": 1200}),
            run("zb-v", speed=9000.0, **{"train.steps": 1200, "schedule.microbatches": 4}),
        ]
    )
    ratios = [each.throughput_ratio for each in (sync, fastest, delayed)]
    assert ratios == [pytest.approx(0.8), None, pytest.approx(1.2)]
    assert (delayed.fastest.schedule, delayed.baseline.schedule) == ("zb-v", "1f1b")


def test_losses_that_are_not_finite_are_not_drawn_over_time() -> None:
    runs = runs_of([("1f1b", 1200, curve(1200), 1000.0), *DELAYED], **{"data.context": 128})
    bad = replace(runs[1], val_loss=math.nan)
    lines = charts_of_cells(averaged([runs[0], bad, *runs[2:]]))["time"].lines
    assert [None in line.y for line in lines if line.high is None] == [True, False]


@pytest.mark.parametrize("seed", [0, 9])
def test_speeds_without_two_common_seeds_do_not_decide(seed: int) -> None:
    """Of seed 9 there is no pair at all."""
    runs = runs_of([("1f1b", 1200, curve(1200), None), *DELAYED])
    runs.append(run("zb-v", loss=None, speed=1000.0, seed=seed, **{"train.steps": 100}))
    [verdict] = verdicts(averaged(runs))
    assert verdict.answer == UNDECIDED
    assert sentence(verdict).endswith(
        "The speed has fewer than two pairs of runs with one seed: measure that of more seeds."
    )


def test_a_speed_of_zero_is_none() -> None:
    [verdict] = verdicts(averaged(runs_of([("1f1b", 1200, curve(1200), 0.0), *DELAYED])))
    assert verdict.reason == "no throughput was measured"


@pytest.mark.parametrize("steps", [100, 1000])
def test_the_longest_synchronous_runs_give_the_loss_and_the_fastest_the_time(steps: int) -> None:
    fastest = ("zb-v", steps, curve(steps), 1250.0)
    [verdict] = verdicts(averaged(runs_of([("1f1b", 1200, curve(1200), 1000.0), fastest, *DELAYED])))
    assert (verdict.synchronous.schedule, verdict.fastest.schedule) == ("1f1b", "zb-v")
    assert verdict.speed.ratio == pytest.approx(1500 / 1250, rel=1e-3)


@pytest.mark.parametrize(
    ("precision", "shift", "refused"),
    [
        *(("float32", 0.1, True), ("float32", 1e-3, True), ("bfloat16", 0.1, True), ("float64", 1e-7, True)),
        *(("float32", 1e-7, False), ("bfloat16", 1e-3, False)),  # sums in another order
    ],
)
def test_synchronous_schedules_with_other_losses_do_not_stand_for_each_other(
    precision: str, shift: float, refused: bool
) -> None:
    runs = runs_of([("1f1b", 1200, curve(1200), 1000.0), *DELAYED], **{"train.precision": precision})
    for each in runs_of([("zb-v", 1200, curve(1200), 1000.0)], **{"train.precision": precision}):
        seed = each.value("seed")
        loss = curve(1200) + shift * (1 + 1e-4 * seed) + 1e-3 * seed
        runs.append(replace(each, val_loss=loss))
    found, not_answered = lines_of(averaged(runs))
    if refused:
        assert found == []
        [line] = not_answered
        assert "should have the same loss" in line
    else:
        assert found[0].startswith("Pays: ")


def test_a_run_for_its_speed_alone_has_no_loss_in_any_format(tmp_path: Path) -> None:
    experiment = ExperimentFolder(tmp_path / "e")
    for seed in (0, 1):
        whole = experiment.add(settings("1f1b", "muon", 0.0, seed), rows=metrics())
        experiment.add(
            settings("zb-v", "muon", 0.0, seed, **{"train.steps": 2}),
            rows=metrics(val_losses=[9.87], steady=[(9000, 2.0)], busy=[(0.9, 0.9)], evaluated=[2], stages=4),
            loss_of=whole.id,
        )
        delayed = [(4000, 2.0), (4000, 2.0)]
        experiment.add(settings("2bw", "muon", 0.0, seed), rows=metrics(steady=delayed, delay=1))
    by_schedule = {cell["schedule"]: cell for cell in cells_of(experiment.folder)}
    short = by_schedule["zb-v"]
    assert (short["val_loss"], short["bits_per_byte"], short["loss_of"]) == (None, None, "1f1b")
    assert short["tokens_per_second"] == 4500
    assert by_schedule["2bw"]["fastest_synchronous"] == "zb-v"
    assert (by_schedule["2bw"]["baseline"], by_schedule["1f1b"]["loss_of"]) == ("1f1b", None)

    for output in ("table", "markdown", "latex", "csv", "json"):
        written = succeeded("report", experiment.folder, "--format", output).output
        assert "9.87" not in written
    table = " ".join(succeeded("report", experiment.folder, "--target", "3.5").output.split())
    assert "as 1f1b" in table
    assert "not reached" not in table
    assert "Loss of 1f1b; zb-v ran 2 steps for its speed" in table
    assert " 4 steps; " in table  # the conditions
    page = tmp_path / "report.html"
    succeeded("report", experiment.folder, "--format", "html", "--out", page)
    # In the list of the chart, which shows losses.
    assert re.findall(r'"val_loss":\s*(\S+?),\s*"without_loss":\s*"([^"]*)"', page.read_text())[1] == (
        "null",
        "as 1f1b",
    )
    assert "9.87" not in re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page.read_text(), flags=re.DOTALL)


def test_replayed_runs_have_no_time() -> None:
    runs = runs_of([("1f1b", 1200, curve(1200), None), *((*arm[:3], None) for arm in DELAYED)])
    runs = [replace(one, start=Start(step=0, replayed=True)) for one in runs]
    _, [line] = lines_of(averaged(runs))
    assert "replayed runs have no throughput" in line


def test_the_chart_has_the_arms_over_time() -> None:
    chart = charts_of_cells(cells(ratio=1.1, speed=1.3))["time"]
    by_arm = {line.name: line for line in chart.lines if line.high is None}
    assert len(by_arm) == 2
    assert {line.name for line in chart.lines if line.high is not None} == set(by_arm)
    [synchronous] = [line for name, line in by_arm.items() if "2bw" not in name]
    [delayed] = [line for name, line in by_arm.items() if "2bw" in name]
    assert (len(synchronous.x), len(delayed.x)) == (1, 3)
    # Both are timed at their own speed; the synchronous arm at that of zb-v.
    assert delayed.x[1] / synchronous.x[0] == pytest.approx(1400 / 1200 / 1.3, rel=0.01)
    assert chart.x == "training time, hours"


def test_rates_chosen_on_the_compared_seeds_are_said_to_be() -> None:
    arms = [("1f1b", 1200, curve(1200), 1000.0), *DELAYED]
    worse = [(name, steps, loss + 0.1, speed) for name, steps, loss, speed in arms]
    runs = [*runs_of(arms, **{"optimizer.lr": 0.01}), *runs_of(worse, **{"optimizer.lr": 0.02})]
    compared, _, choices = aggregate_best(runs, keys=["train.steps"], best_over=["optimizer.lr"])
    assert any("(on the edge)" in choice for choice in choices)
    assert any("chosen on the seeds that are compared" in line for line in lines_of(compared)[0])


@pytest.mark.slow
def test_steps_are_carried_over_to_a_planned_run() -> None:
    found = verdicts(cells(ratio=1.1, speed=1.3))
    target = Target(model="135m", gpus=4, tokens_per_step=2**14, device="h100")
    [carried] = transfers(found, target)
    planned = listing(
        base_of("135m", ["optimizer=muon"]).config,
        Shared(Roofline(find_device("h100", key=""))),
        gpus=4,
        tokens_per_step=2**14,
        names=[name for name in CONSIDERED if is_synchronous(name) or name.startswith("2bw")],
        limit_gb=75.0,
        with_sharded=False,
    ).best
    synchronous, delayed = planned["synchronous"], planned["delay 1"]
    size = ("--gpus", "4", "--tokens-per-step", str(2**14))
    listed = json.loads(succeeded("plan", "135m", "optimizer=muon", *size, "--json").output)
    first = next(row for row in listed if row["delay"] == 0)
    # A pipeline, or FSDP where that needs less.
    assert first["step_time"] <= synchronous.step.seconds
    speed = first["step_time"] / delayed.step.seconds
    assert carried.speed == pytest.approx(speed)
    assert carried.synchronous.step.seconds == first["step_time"]
    assert list(carried.synchronous.memory) == first["memory"]
    assert carried.times[0] == pytest.approx(found[0].steps.ratio / speed)
    assert "measured at another size, nano" in carried.sentence
    same = replace(carried, target=replace(target, model="nano"))
    assert same.sentence.endswith("the steps of 2bw muon were measured.")
    assert "The speed is planned" in carried.sentence
    assert carried.record()["answer"] == carried.answer


@pytest.mark.slow
def test_steps_are_carried_over_to_the_machine_of_a_template(tmp_path: Path) -> None:
    found = verdicts(cells(ratio=1.1, speed=1.3))
    gpu, size = "rtx4090,gpus_per_node=2,node_gbs=0.25", {"gpus": 4, "tokens_per_step": 2**14}
    template = tmp_path / "decides.yaml"
    lines = {
        "schedule": "1f1b",
        "model": "135m",
        "data.context": 512,
        "train.precision": "bfloat16",
        "optimizer": "muon",
    }
    lines |= {
        "parallel.stages": 4,
        "schedule.microbatches": 8,
        "train.microbatch_size": 4,
        "train.steps": 100,
    }
    template.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    with pytest.raises(UserError, match="names no GPU"):
        transfers(found, Target(model=str(template), gpus=4, device=None))
    [given] = transfers(found, Target(model=str(template), device=gpu, **size))
    template.write_text(f"{template.read_text()}site.gpu: {gpu}\n")
    [carried] = transfers(found, Target(model=str(template), gpus=4, device=None))
    assert carried.speed == given.speed
    assert carried.target == Target(model="135m", device=gpu, **size)
    assert carried.delayed.config.data.context == 512
    [faster] = transfers(
        found, Target(model=str(template), gpus=4, device="rtx4090,gpus_per_node=2,node_gbs=25")
    )
    assert faster.delayed.step.seconds < carried.delayed.step.seconds


@pytest.mark.slow
def test_the_command_says_what_it_cannot_carry_over(tmp_path: Path) -> None:
    folder = quickstart_folder(tmp_path / "experiment").folder
    planned = ("--for", "135m", "--gpus", "2", "--tokens-per-step", "32768")
    table = succeeded("report", folder, *planned)
    assert " ".join(table.output.split()).count("has a ratio of steps to carry over") == 1
    listed = json.loads(asyncpp("report", folder, *planned, "--format", "json").output)
    assert any(one["time_ratio"] is None for cell in listed for one in cell["planned"])


@pytest.mark.parametrize(("parent", "lengths"), [("constant", 3), ("cosine", 1)])
def test_decays_of_a_constant_trunk_are_lengths_of_an_arm(parent: str, lengths: int) -> None:
    """Those of a run that had decayed already are not: their rate jumps."""
    runs = []
    for each in runs_of([("1f1b", 1200, curve(1200), 1000.0), *DELAYED], **{"optimizer.schedule": "wsd"}):
        step = int(0.8 * each.value("train.steps"))
        changed = {"optimizer.schedule": (parent, "wsd")}
        parts = {"experiment": "/trunk", "run": "trunk", "step": step, "steps": step, "changed": changed}
        lineage = Lineage(**parts, saved_by=Owner(run="trunk", config_sha256="0" * 64))
        runs.append(replace(each, lineage=lineage, config=each.config | {"continues": lineage.label}))
    found = [verdict for verdict in verdicts(averaged(runs)) if not verdict.delayed.synchronous]
    assert len(found[0].lengths) == lengths
    assert (found[0].steps is not None) == (parent == "constant")
