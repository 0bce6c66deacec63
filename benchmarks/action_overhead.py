"""What the trainer costs beyond a plain training loop.

    python benchmarks/action_overhead.py --json

Replay of a single stage and an ordinary loop (forward, backward, clip, step) train the same decoder on the
same batches, in turns, a few steps each; the figure is the median of the ratios of neighbours, with its
quartiles.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import torch
from frame import conditions, in_turns, parser, publish
from torch import nn

from optimizers.build import build_optimizer
from schedules import build
from stages.comm.topology import connect_in_process
from stages.config.run_config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from stages.data.batches import Batches
from stages.data.dataset import prepare
from stages.liveness.stop_signal import never
from stages.metrics import step_row
from stages.model.decoder import Stage, initialise
from stages.model.head_loss import next_token_loss
from stages.pipeline.build import build_ranks
from stages.pipeline.executor import drive
from stages.resolve.facts import facts
from stages.shape.partition import cut_model
from stages.update.lr_schedule import learning_rate_factor
from stages.update.rank_stats import StepResult

PLAIN_STEPS = 2
"""Of a turn."""


def decoder_config() -> RunConfig:
    """The quickstart's model and batches, on a single stage."""
    return RunConfig(
        schedule=ScheduleConfig(name="1f1b", microbatches=2),
        optimizer=OptimizerConfig(name="adamw"),
        model=ModelConfig(name="nano", layers=4, width=128, heads=4, kv_heads=2, mlp_width=384),
        data=DataConfig(context=128),
        parallel=ParallelConfig(stages=1),
        train=TrainConfig(steps=10**6, microbatch_size=8, eval_interval=10**6),
    )


def replay_of_one_stage(config: RunConfig) -> Callable[[int], None]:
    """Trains `PLAIN_STEPS` steps from the given one, as a replay does."""
    connections = connect_in_process(rank_of_stage=range(1), data_ranks=1)
    rows = []

    def on_step(result: StepResult) -> None:
        rows.append(step_row(result, tokens=0, seconds=result.time).encoded())

    (rank,) = build_ranks(
        facts(config),
        connections=connections,
        corpus=prepare(config.data),
        device=torch.device("cpu"),
        on_step=on_step,
        stop=never,
    )

    def turn(step: int) -> None:
        microbatches = config.schedule.microbatches
        program = build("1f1b", stages=1, microbatches=microbatches, steps=PLAIN_STEPS, first_step=step)
        drive([rank.executor.run(program)])
        connections[0].links.finish()

    return turn


def plain_loop(config: RunConfig) -> Callable[[int], None]:
    """The same steps as one would write them down."""
    (cut,) = cut_model(config.model, stages=1, context=config.data.context)
    module = Stage(config.model, cut, context=config.data.context)
    module.prepare(device=torch.device("cpu"), dtype=torch.float32)
    for name, parameter in module.named_parameters():
        initialise(parameter, name=name, seed=config.seed, model=config.model)
    optimizer = build_optimizer(
        dict(module.named_parameters()),
        name=config.optimizer.name,
        lr=config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        options={},
    )
    batches = Batches(config, prepare(config.data), device=torch.device("cpu"))
    microbatches = config.schedule.microbatches
    rows = []

    def turn(step: int) -> None:
        for now in range(step, step + PLAIN_STEPS):
            total = 0.0
            for microbatch in range(now * microbatches, (now + 1) * microbatches):
                output = module(batches.tokens(microbatch))
                loss = next_token_loss(output, batches.targets(microbatch)) / microbatches
                loss.backward()
                total += float(loss.detach())
            norm = nn.utils.clip_grad_norm_(module.parameters(), config.train.clip_norm)
            for group in optimizer.param_groups:
                factor = learning_rate_factor(config.optimizer, step=now, steps=config.train.steps)
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad()
            rows.append(json.dumps({"step": now, "train_loss": total, "grad_norm": float(norm)}))

    return turn


def against_plain_loop(turns: int) -> dict[str, float]:
    """Seconds of a replay of one stage over those of a plain loop: median and quartiles, by clock."""
    config = decoder_config()
    clocks = {"cpu": time.process_time, "wall": time.perf_counter}

    def timed(turn: Callable[[int], None], step: Iterator[int]) -> dict[str, float]:
        before = {clock: read() for clock, read in clocks.items()}
        turn(next(step))
        return {clock: read() - before[clock] for clock, read in clocks.items()}

    arms = {"replay": replay_of_one_stage(config), "plain": plain_loop(config)}
    # The first turn warms up.
    seconds = in_turns(
        {name: partial(timed, turn, count(step=PLAIN_STEPS)) for name, turn in arms.items()},
        rounds=turns + 1,
    )
    figures = {}
    for clock in clocks:
        pairs = zip(seconds["replay"][1:], seconds["plain"][1:], strict=True)
        quartiles = statistics.quantiles(replay[clock] / plain[clock] for replay, plain in pairs)
        for part, ratio in zip(("quartile_1", "median", "quartile_3"), quartiles, strict=True):
            figures[f"replay_over_plain_{clock}_{part}"] = ratio
    return figures


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--turns", type=int, default=40, help="timed turns")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    figures = against_plain_loop(options.turns)
    title = "What the trainer costs beyond a plain loop"
    publish("action-overhead", title, [figures], conditions(options), options)


if __name__ == "__main__":
    main()
