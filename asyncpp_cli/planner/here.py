"""Expected time of small runs on the CPU of this machine: the parts of their models are measured for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import fsum
from pathlib import Path
from tempfile import TemporaryDirectory

from asyncpp_cli.base.console import roughly
from asyncpp_cli.base.import_path import environment_of_program
from asyncpp_cli.base.progress import shown
from asyncpp_cli.planner.cells import estimate_key
from asyncpp_cli.planner.costs.profile_costs import Measured, conditions
from asyncpp_cli.planner.estimate import estimate
from asyncpp_cli.runs.config_file import config_text
from asyncpp_cli.sites.resources import Machine, resources_of, this_machine
from stages.config.own_code import named_code
from stages.config.run_config import OWN_SPLIT, RunConfig, eval_microbatches, tokens_per_step
from stages.config.segments import as_data_ranks
from stages.shape.families import describe

_MOST_FLOPS = 2e10
"""Most FLOPs of a micro-batch through the whole model that is measured: about a second on a core."""
_START_SECONDS = 3.0
"""From a run's start to its first step, and from its last step to its end."""
_LONG_FLOPS = 1e12
"""FLOPs of runs that take about a minute."""
_MEASURED: dict[str, Measured] = {}
"""What this process has measured, by `_kind`."""


def seconds_here(configs: Sequence[RunConfig], *, machine: Machine) -> list[float | None]:
    """Seconds that each run takes alone on this machine.

    None where that is unknown: it would train on a GPU, names code of the user's own, is compiled, masks
    documents, or is too large to be measured in a few seconds.
    """
    measurable = [
        replace(config, site=replace(config.site, device="cpu")) if _is_measurable(config, machine) else None
        for config in configs
    ]
    new = {_kind(config): config for config in measurable if config is not None}
    new = {kind: config for kind, config in new.items() if kind not in _MEASURED}
    if new:
        with shown("measuring the model's parts here"):
            _MEASURED.update(zip(new, _measured(new.values()), strict=False))
    steps: dict[str, float] = {}
    seconds: list[float | None] = []
    for config in measurable:
        if config is None or (measured := _MEASURED.get(_kind(config))) is None:
            seconds.append(None)
            continue
        key, train, parts = _kind(config) + estimate_key(config), config.train, measured.parts(config)
        if key not in steps:
            steps[key] = estimate(as_data_ranks(config), measured, limit_gb=None).step.seconds
        forward = fsum(part.forward for part in (parts.embedding, *parts.blocks, parts.head))
        evaluated = eval_microbatches(config, OWN_SPLIT, tokens=10**12)
        evaluated *= -(-train.steps // train.eval_interval)
        busy = steps[key] * train.steps + evaluated * forward / as_data_ranks(config).parallel.stages
        cores = resources_of(config, replay=False, machine=machine).cores
        seconds.append(_START_SECONDS + busy * max(1.0, cores / machine.cores))
    return seconds


def are_long(configs: Iterable[RunConfig]) -> bool:
    """Whether runs take longer than a minute or so on a CPU, so that it is worth measuring how long."""
    return (
        fsum(
            tokens_per_step(config)
            * config.train.steps
            * describe(config.model).training_flops(context=config.data.context)
            for config in configs
            if config.model.factory is None
        )
        >= _LONG_FLOPS
    )


def _kind(config: RunConfig) -> str:
    """What a measurement depends on."""
    return repr([conditions(config), config.train.microbatch_size, config.site.threads])


def _is_measurable(config: RunConfig, machine: Machine) -> bool:
    on_cpu = config.site.gpu is None and (config.site.device == "cpu" or not machine.gpus)
    if not on_cpu or config.train.compile or config.data.document_mask or named_code(config):
        return False
    context = config.data.context
    flops = describe(config.model).training_flops(context=context)
    return config.train.microbatch_size * context * flops <= _MOST_FLOPS


def _measured(configs: Collection[RunConfig]) -> list[Measured]:
    """Measured in another process, as torch would stay in this one; none if that one fails.

    It is a program of its own: multiprocessing would run a script of the user's again.
    """
    with TemporaryDirectory(prefix="asyncpp-") as folder:
        files = [Path(folder, f"{number}.yaml") for number, _ in enumerate(configs)]
        for file, config in zip(files, configs, strict=True):
            file.write_text(config_text(config), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "asyncpp_cli.planner.costs.measure", str(os.getpid()), *map(str, files)],
            env=environment_of_program(),
            capture_output=True,
            check=False,
        )
    contents = json.loads(done.stdout) if done.returncode == 0 else []
    return [Measured(Path("this machine"), content) for content in contents]


def said_of_all(configs: Sequence[RunConfig], seconds: Sequence[float | None]) -> str:
    """A sentence with the time until all runs of a known time have ended here."""
    machine = this_machine()
    known = [(config, taken) for config, taken in zip(configs, seconds, strict=True) if taken is not None]
    taken = together([config for config, _ in known], [taken for _, taken in known], machine=machine)
    of_runs = f" ({len(known)} of {len(configs)} runs)" if len(known) < len(configs) else ""
    cores = f"{machine.cores} core{'s' * (machine.cores > 1)}"
    return f"Expected time on this machine ({cores}): {roughly(taken)}{of_runs}."


def together(configs: Sequence[RunConfig], seconds: Sequence[float], *, machine: Machine) -> float:
    """Seconds until all runs have ended, as many at a time as there are cores for."""
    shares = (
        taken / max(1, machine.cores // resources_of(config, replay=False, machine=machine).cores)
        for config, taken in zip(configs, seconds, strict=True)
    )
    return max(fsum(shares), max(seconds, default=0.0))
