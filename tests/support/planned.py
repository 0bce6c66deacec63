"""Memory that a run measures, against what is planned of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from support.small_runs import Rows, replayed

from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.costs.devices import find_device
from asyncpp_cli.planner.costs.roofline import Roofline
from asyncpp_cli.planner.estimate import Estimate, estimate
from asyncpp_cli.planner.layouts import Variant, layout
from schedules import analyze
from stages.config.run_config import RunConfig, changed
from stages.config.segments import segment_program
from stages.memory.estimate import rank_activations
from stages.memory.in_flight import in_flight

COSTS = Roofline(find_device("h100", key=""))


def layout_of(
    model: str,
    schedule: str,
    *changes: str,
    stages: int = 4,
    data: int = 1,
    microbatches: int = 16,
    recompute: str = "none",
    size: int = 1,
    **options: Any,
) -> RunConfig:
    """A layout of a model with changed settings; of micro-batches of one sequence unless `size` says more."""
    sizes: Any = {"stages": stages, "data": data, "microbatches": microbatches, "recompute": recompute}
    return layout(base_of(model, list(changes)).config, Variant(schedule, **options), size=size, **sizes)


def planned(config: RunConfig) -> Estimate:
    """What the planner says of a run on CPUs."""
    config = changed(config, {"site.device": "cpu"})
    return estimate(config, COSTS, limit_gb=None)


def check_as_planned(config: RunConfig) -> Rows:
    """The rows of a replay of one segment: every kind of memory of every stage is planned to the byte."""
    config = changed(config, {"site.device": "cpu"})
    plan, rows = planned(config), replayed(config)
    memory = rows.memory
    expected = {kind: [getattr(stage, kind) for stage in plan.stages] for kind in asdict(plan.stages[0])}
    assert {kind: memory[kind] for kind in expected} == expected
    assert sum(memory["total"]) == sum(map(sum, expected.values())) + sum(memory["messages"])
    program = segment_program(config, first_step=0, steps=config.train.steps)
    analysis = analyze(program)
    assert memory["versions"] == list(analysis.versions)
    assert memory["in_flight"] == list(analysis.activations)
    assert memory["in_flight"] == [max(map(sum, counts)) for counts in in_flight(program)[0]]
    assert memory["rank_activations"] == rank_activations(config, program)
    held = [of_rank["activations"] for of_rank in plan.memory]
    assert all(here <= most for here, most in zip(held, memory["rank_activations"], strict=True))
    return rows
