"""Small configurations to train, and the part of their rows that is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from support.small_runs import Rows, in_processes, replayed, small_config, trained_here, with_experts

from stages.comm.process import Process
from stages.config.run_config import RunConfig, changed

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {},
    "interleaved-1f1b": {},
    "zero-bubble": {},
    "2bw": {},
    "pipedream": {"update_interval": 1},
    "pipedream-unstashed": {"update_interval": 2},
    "paci": {},
}
TWO_STAGES_A_RANK: dict[str, dict[str, Any]] = {
    "looped-bfs": {},
    "zb-v": {},
    "v-half": {},
    "v-min": {},
    "dualpipe-v": {},
    "2bw-v": {"split": True},
    "paci-v": {"update_interval": 1},
}
SHARDED = ("1f1b", "gpipe", "zero-bubble", "zb-v", "v-half", "interleaved-1f1b")
"""Synchronous schedules that take shards of the head."""
DELAYED = ("2bw", "2bw-v", "pipedream", "pipedream-unstashed", "paci")


OPTIMIZERS: dict[str, tuple[str, float]] = {
    "gpipe": ("adamw", 0.0),
    "1f1b": ("muon", 0.0),
    "interleaved-1f1b": ("adamw", 0.0),
    "zero-bubble": ("muon", 0.0),
    "2bw": ("muon", 1.0),
    "pipedream": ("adamw", 1.0),
    "pipedream-unstashed": ("muon", 0.0),
    "paci": ("adamw", 1.0),
}
"""Optimizer and error-feedback coefficient for each schedule."""


def cases(*, stages: int, experts_at: int, other: bool = False) -> list[RunConfig]:
    """Every schedule with the optimizer and coefficient of `OPTIMIZERS`, and a second model family; some with
    selective recomputation, and two with stages that begin and end within a block.

    Args:
        stages: of the pipeline.
        experts_at: 0 or 1: the even or the odd ones have a mixture of experts.
        other: with the other optimizer, and where there is a delay with error feedback and without.
    """
    common: dict[str, Any] = {"stages": stages, "microbatches": 2 * stages}
    within = {"optimizer": "muon", "cut": within_blocks(layers=4, stages=stages)}
    qwen3 = small_config("2bw", family="qwen3", recompute="selective", layers=4, **common, **within)
    qwen3 = changed(qwen3, {"model.head_dim": 6})
    within["cut"] = within_blocks(layers=2 * stages, stages=2 * stages)
    whole = small_config("2bw-v", layers=2 * stages, coefficient=1.0, **common, **within)
    configs = [qwen3, whole] + [
        small_config(
            schedule,
            optimizer=optimizer,
            coefficient=coefficient,
            recompute="selective" if optimizer == "muon" and schedule in ("2bw", "zero-bubble") else "none",
            **common,
            **options,
        )
        for schedule, options in (SCHEDULES | TWO_STAGES_A_RANK).items()
        for optimizer, coefficient in _chosen(schedule, other=other)
    ]
    # The bias moves by a step that changes the choice of experts.
    return [
        with_experts(config, balance_rate=0.02) if number % 2 == experts_at else config
        for number, config in enumerate(configs)
    ]


def _chosen(schedule: str, *, other: bool) -> list[tuple[str, float]]:
    """Optimizers and coefficients that a schedule is trained with."""
    optimizer, coefficient = OPTIMIZERS.get(schedule, ("adamw", 0.0))
    if other and schedule in SCHEDULES:
        optimizer = "adamw" if optimizer == "muon" else "muon"
    if other and schedule in DELAYED:
        return [(optimizer, 0.0), (optimizer, 1.0)]
    return [(optimizer, coefficient)]


def named(case: Mapping[str, Any]) -> str:
    """A test's name, from the settings of its run."""
    return " ".join(value if isinstance(value, str) else f"{key}={value}" for key, value in case.items())


def of_every_schedule(**options: Any) -> list[RunConfig]:
    """Every schedule of one stage a rank, with its optimizer and coefficient."""
    chosen = {name: {"optimizer": rule, "coefficient": c} for name, (rule, c) in OPTIMIZERS.items()}
    return [small_config(name, **own, **chosen[name], **options) for name, own in SCHEDULES.items()]


def within_blocks(*, layers: int, stages: int) -> list[float]:
    """A cut of which every stage begins or ends between attention and MLP."""
    return [1.5, *[1.0] * (stages - 2), layers - stages + 0.5]


def of_writers(by_rank: list[list[Any]]) -> list[Any]:
    """For each run, the result of the one rank that writes rows."""
    return [next(filter(any, of_ranks)) for of_ranks in zip(*by_rank, strict=True)]


def train_here(process: Process, config: RunConfig) -> list[dict[str, Any]]:
    """Train as one process of a run; the rows that it writes, without timings."""
    return measured(trained_here(process, config))


def check_processes_are_replays(
    configs: Sequence[RunConfig],
    *,
    size: int,
    train: Callable[[Process, RunConfig], list[dict[str, Any]]] = train_here,
) -> list[list[dict[str, Any]]]:
    """Train in `size` processes, of which one writes rows: those of a replay, bit for bit. Returns them."""
    by_rank = in_processes(train, configs, size=size)
    assert all(sum(rows != [] for rows in of_config) == 1 for of_config in zip(*by_rank, strict=True))
    of_runs = of_writers(by_rank)
    for config, distributed in zip(configs, of_runs, strict=True):
        assert distributed == measured(replayed(config)), config
        assert distributed[-1]["weights_sha256"]
    return of_runs


def measured(rows: Rows) -> list[dict[str, Any]]:
    """The rows of a run without timings."""
    timed = {"time", "seconds", "steady_seconds", "steady_tokens", "busy", "replayed"}
    timed |= {"action_seconds", "compute_seconds", "warm_up_seconds"}
    between_processes = {"messages", "reduction", "total"}
    return [
        {
            key: {kind: size for kind, size in value.items() if kind not in between_processes}
            if key == "memory"
            else value
            for key, value in row.items()
            if key not in timed
        }
        for row in rows.rows
    ]
