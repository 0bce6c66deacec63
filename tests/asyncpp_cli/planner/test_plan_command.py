"""What `asyncpp plan` says of layouts that it does not list, and of those that it cannot offer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_line import refusal, succeeded
from support.planned import COSTS, layout_of

from asyncpp_cli.experiment.matrix import expand
from asyncpp_cli.experiment.template import load
from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.estimate import Estimate, own_estimate
from asyncpp_cli.planner.listing import listed
from asyncpp_cli.planner.shared import Shared
from stages.config.run_config import changed, tokens_per_step
from stages.memory.estimate import message_bytes

FEW = ("--schedule", "1f1b", "--schedule", "2bw")
SMALL = ("plan", "nano", "data.context=128", "--tokens-per-step", "4096")


@pytest.mark.slow
def test_the_sentence_does_not_depend_on_what_is_listed() -> None:
    """A delay of one is named if it is faster, though more delay is faster still and fills the list."""
    words = ("plan", "360m", "data.context=1024", "--gpus", "16", "--tokens-per-step", "32768")
    said = []
    for rows in ("1", "8"):
        found = succeeded(*words, "--rows", rows)
        said.append([line for line in found.errors.splitlines() if "of its step to exchanges" in line])
    assert said[0] == said[1]
    assert "pays if its delay of 1 costs fewer" in said[0][0]


def test_tokens_that_do_not_divide_are_named_with_some_that_would() -> None:
    said = succeeded(*SMALL, "--gpus", "3", "--rows", "1", "model.layers=6").errors
    assert "FSDP: 4,096 tokens per step do not divide into sequences of 128 for 3 GPUs" in said
    assert "--tokens-per-step 3,840 or 4,224 would" in said


def test_what_does_not_fit_is_not_offered_as_settings() -> None:
    words = (*SMALL, *FEW, "--gpus", "2", "--memory", "0.001")
    found = succeeded(*words)
    assert "as settings:" not in found.errors
    assert "It does not fit, so its settings are not shown" in found.errors
    assert "--as-template: no layout of these fits" in refusal(*words, "--as-template", "x.yaml")


def test_a_row_that_does_not_fit_is_told_from_a_plan_in_which_none_does(tmp_path: Path) -> None:
    words = (*SMALL, *FEW, "--gpus", "2", "--rows", "500", "--memory", "1.05")
    fits = [line.split() for line in succeeded(*words).output.splitlines() if " x " in line]
    number = 1 + next(row for row, cells in enumerate(fits) if "no" in cells)
    assert number > 1
    said = refusal(*words, "--row", str(number), "--as-template", tmp_path / "x.yaml")
    assert f"--as-template: row {number} does not fit" in said


@pytest.mark.parametrize(
    ("what", "changes", "steps"),
    [("quickstart", [], 300), ("nano", ["data.context=128", "train.steps=70"], 70)],
)
def test_a_run_takes_the_steps_that_are_given_whatever_tokens_they_read(
    what: str, changes: list[str], steps: int, tmp_path: Path
) -> None:
    """As its template does."""
    file = tmp_path / "decides.yaml"
    words = ("plan", what, *changes, *FEW, "--gpus", "2", "--device", "l4", "--tokens-per-step", "16384")
    for row in json.loads(succeeded(*words, "--json").output):
        assert row["gpu_hours"] == pytest.approx(2 * steps * row["step_time"] / 3600)
    succeeded(*words, "--as-template", file)
    assert steps in {cell.config.train.steps for cell in expand(load(str(file), []))}


def test_a_map_of_tokens_that_do_not_divide_names_them_and_refuses_a_picture_first() -> None:
    words = ("plan", "quickstart", "--gpus", "2", "--device", "l4", "--map", "--tokens-per-step", "1000")
    assert "--tokens-per-step 1000: no layout" in refusal(*words)
    assert "a picture is a file of .svg" in refusal(*words, "--out", "map.txt")


@pytest.mark.slow
def test_a_map_says_how_sure_a_ratio_to_fsdp_is() -> None:
    for context, said in ((128, "4 % where that is a pipeline, 13 %"), (8192, "a pipeline, 15 %")):
        words = ("nano", f"data.context={context}", "--gpus", "2", "--tokens-per-step", "65536", *FEW)
        assert said in " ".join(succeeded("plan", *words, "--map").output.split())


def test_the_template_of_a_plan_decides_whether_its_delay_pays(tmp_path: Path) -> None:
    file = tmp_path / "decides.yaml"
    said = succeeded(*SMALL, *FEW, "--gpus", "4", "--as-template", file).errors
    configs = [cell.config for cell in expand(load(str(file), []))]
    synchronous = [config for config in configs if config.schedule.name == "1f1b"]
    delayed = [config for config in configs if config.schedule.name == "2bw"]
    assert (len(synchronous), len(delayed)) == (1, 6)
    lengths = sorted({config.train.steps for config in delayed})
    assert synchronous[0].train.steps == lengths[1]
    assert {config.error_feedback.coefficient > 0 for config in delayed} == {False, True}
    assert {tokens_per_step(config) for config in configs} == {4096}
    assert all(config.parallel.stages * config.parallel.data == 4 for config in configs)
    settings = said.split("as settings: ")[1].splitlines()[0].split()
    assert f"schedule.microbatches={delayed[0].schedule.microbatches}" in settings
    # A report's interval needs two seeds.
    assert f"asyncpp sweep {file} 'matrix.seed=[0,1]' --out E; asyncpp launch E; " in said
    assert len(expand(load(str(file), ["matrix.seed=[0,1]"]))) == 2 * len(configs)
    assert said.rstrip().endswith(f"asyncpp report E --for {file} --gpus 4")


def test_the_template_of_a_planned_experiment_trains_both_layouts_as_planned(tmp_path: Path) -> None:
    """Settings of the delayed one must not replace those of the other."""
    file, words = tmp_path / "decides.yaml", ("plan", "quickstart", "--gpus", "4", "--device", "l4")
    schedules = ("--schedule", "1f1b", "--schedule", "paci-v")
    succeeded(*words, *schedules, "--as-template", file)
    rows = json.loads(succeeded(*words, *schedules, "--json").output)
    best = {row["schedule"]: row for row in reversed(rows)}
    trained = {
        config.schedule.name: config for config in (cell.config for cell in expand(load(str(file), [])))
    }
    assert trained.keys() == {"1f1b", "paci-v"}
    layout = trained["1f1b"]
    assert (layout.parallel.stages, layout.schedule.microbatches, layout.train.clip) == (
        best["1f1b"]["stages"],
        best["1f1b"]["microbatches"],
        "global",
    )


def test_the_template_of_a_planned_experiment_has_no_runs_for_speed_alone(tmp_path: Path) -> None:
    """It trains one synchronous layout, whose loss no other gives."""
    file = tmp_path / "decides.yaml"
    succeeded("plan", "verdict", *FEW, "--gpus", "2", "--device", "l4", "--as-template", file)
    assert {cell.config.train.steps for cell in expand(load(str(file), []))} == {900, 1200, 1500}


def test_the_report_of_a_plan_without_a_gpu_is_asked_for_the_one_that_ordered_it(tmp_path: Path) -> None:
    file = tmp_path / "decides.yaml"
    said = succeeded("plan", "quickstart", "--gpus", "4", *FEW, "--as-template", file).errors
    assert f"asyncpp report E --for {file} --gpus 4 --device h100\n" in said


def test_the_sentence_names_the_correction_and_whether_it_has_room() -> None:
    words = (*SMALL, "--gpus", "4", "--rows", "3")
    assert "with adamw (docs/optimizers.md; error feedback fits), pays if" in succeeded(*words).errors
    corrected = succeeded(*words, "optimizer=muon", "error_feedback=true").errors
    assert "with muon and error feedback (docs/optimizers.md), pays if" in corrected


def test_a_template_has_the_machine_of_its_plan(tmp_path: Path) -> None:
    """So its cells take as long, and a plan of it is the same one."""
    file, size = tmp_path / "decides.yaml", ("--gpus", "4")
    links = ("--device", "rtx4090", "--gpus-per-node", "2", "--node-bandwidth", "0.5", "--memory", "5")
    words = (*SMALL, *FEW, *size, *links)
    succeeded(*words, "--as-template", file)
    sites = {cell.config.site for cell in expand(load(str(file), []))}
    assert {(site.gpu, site.memory_gb) for site in sites} == {
        ("rtx4090,gpus_per_node=2,node_gbs=0.0625", 5.0)
    }
    rows = json.loads(succeeded(*words, "--json").output)
    again = json.loads(succeeded("plan", file, *FEW, *size, "--json").output)
    numbers = [[row["step_time"], row["memory_gb"], row["neighbours"]] for row in rows]
    assert numbers == [
        [pytest.approx(row["step_time"]), row["memory_gb"], row["neighbours"]] for row in again
    ]
    cells = json.loads(succeeded("sweep", file, "--list", "--json").output)
    for swept, delay in zip(cells[:2], (0, 1), strict=True):
        taken = [row for row in rows if row["step_time"] == pytest.approx(swept["step_seconds"])]
        assert {row["delay"] for row in taken} == {delay}
        assert round(swept["memory_gb"], 3) in [row["memory_gb"] for row in taken]


def test_what_is_recommended_with_a_delay_has_room_for_error_feedback() -> None:
    base = base_of("nano", ["data.context=128"]).config
    asked = {"names": ("1f1b", "2bw"), "gpus": 4, "tokens_per_step": 4096, "with_sharded": False}
    first = listed(base, Shared(COSTS), limit_gb=80.0, **asked).best["delay 1"]

    def corrected(layout: Estimate) -> float:
        return replace(layout, config=changed(layout.config, {"error_feedback.coefficient": 1.0})).memory_gb

    assert corrected(first) > first.memory_gb
    limit = (corrected(first) + first.memory_gb) / 2
    found = listed(base, Shared(COSTS), limit_gb=limit, **asked).best["delay 1"]
    assert corrected(found) < limit
    assert found.step.seconds > first.step.seconds
    with_feedback = changed(base, {"error_feedback.coefficient": 1.0})
    assert listed(with_feedback, Shared(COSTS), limit_gb=limit, **asked).best["delay 1"].place == found.place


def test_the_title_says_what_is_assumed() -> None:
    words = ("optimizer=muon", "train.compile=false", "--gpus-per-node", "4", "--node-bandwidth", "10")
    title = " ".join(succeeded(*SMALL, *FEW, "--gpus", "4", "--rows", "1", *words).output.split())
    for said in ("4,096 tokens per step, muon", "sequences of 128 tokens", "not compiled", "4 GPUs per node"):
        assert said in title
    assert "10 Gbit/s per node" in title
    assert "leave one out" in refusal(*SMALL, "--bandwidth", "1", "--node-bandwidth", "1")


def test_the_gpus_of_a_node_share_its_adapter() -> None:
    """One pipeline has all of it for its messages, four share it; so do the reductions of stages."""
    node = COSTS.over(gpus_per_node=4, network_gbs=1.25 / 4, shares_adapter=True)
    config = layout_of("360m", "1f1b", stages=8, data=1, microbatches=8)
    latency = node.device.latency_us / 1e6
    alone = node.message(config, 3, 4) - latency
    assert alone == pytest.approx(message_bytes(config) / 1.25e9)
    shared = layout_of("360m", "1f1b", stages=8, data=4, microbatches=8)
    assert node.message(shared, 3, 4) - latency == pytest.approx(4 * alone)
    one, two = (layout_of("360m", "1f1b", stages=stages, data=8 // stages) for stages in (1, 2))
    assert node.reduction(two, 10**8) < node.reduction(one, 10**8)
    wide = layout_of("360m", "1f1b", stages=1, data=8)
    assert node.reduction(wide, 10**8) == pytest.approx(10**8 * 6 * 7 / 8 / 1.25e9)


def test_pipelines_are_within_nodes_where_that_leaves_less_to_send() -> None:
    """Over a node's slow adapter many micro-batches take longer than the gradients of their step."""
    costs = COSTS.over(network_gbs=1.25 / 8, shares_adapter=True)
    few, many = (layout_of("360m", "1f1b", stages=4, data=4, microbatches=count) for count in (4, 256))
    assert [costs.neighbours(config) for config in (few, many)] == ["data", "pipeline"]
    inside = Shared(costs).placed(many)
    assert costs.message(inside, 1, 2) < costs.message(many, 1, 2) / 10
    # Four rings of data ranks share the adapter of a node.
    assert costs.reduction(inside, 10**8) == pytest.approx(10**8 * 6 * 3 / 4 / (1.25e9 / 4))
    slow, fast = (own_estimate(config, Shared(costs)).step.seconds for config in (many, inside))
    assert fast < slow
    alone = layout_of("360m", "1f1b", stages=4, data=2, microbatches=256)
    assert costs.neighbours(alone) == "data"
    moved = (changed(config, {"site.neighbours": "pipeline"}) for config in (few, many))
    assert [costs.neighbours(config) for config in moved] == ["data", "pipeline"]


def test_a_template_puts_pipelines_within_nodes(tmp_path: Path) -> None:
    file = tmp_path / "within.yaml"
    words = ("--tokens-per-step", "262144", "--gpus-per-node", "2", "--node-bandwidth", "0.1", "--rows", "1")
    found = succeeded("plan", "nano", "data.context=128", *FEW, "--gpus", "4", *words, "--as-template", file)
    assert "1f1b, pipelines within nodes" in found.output
    assert "site.neighbours=pipeline" in found.errors
    assert [cell.config.site.neighbours for cell in expand(load(str(file), []))] == ["pipeline"]


@pytest.mark.parametrize(("stages", "data", "crosses"), [(2, 1, False), (8, 1, False), (4, 4, True)])
def test_messages_within_a_node_do_not_depend_on_the_network(stages: int, data: int, crosses: bool) -> None:
    config = layout_of("360m", "1f1b", stages=stages, data=data, microbatches=8)
    slow, fast = (own_estimate(config, Shared(COSTS.over(network_gbs=gbs))).step.seconds for gbs in (0.1, 50))
    assert (slow > 1.5 * fast) == crosses
    assert crosses or slow == fast


@pytest.mark.parametrize(("data", "crosses"), [(2, False), (8, False), (16, True)])
def test_gradients_are_reduced_within_a_node_where_its_ranks_share_one(data: int, crosses: bool) -> None:
    """Process r * data + d performs rank r of pipeline d."""
    config = layout_of("360m", "1f1b", stages=1, data=data, microbatches=1)
    slow, fast = (COSTS.over(network_gbs=gbs).reduction(config, 10**8) for gbs in (0.1, 50))
    assert (slow > fast) == crosses
