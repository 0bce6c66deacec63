"""The machine that a plan assumes, and the estimated memory and step time of each cell of a matrix on it;
cells that do not fit their site are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.matrix import ResolvedCell, describe
from asyncpp_cli.planner.costs.devices import find_device
from asyncpp_cli.planner.costs.profile_costs import Measured
from asyncpp_cli.planner.costs.roofline import Roofline
from asyncpp_cli.planner.estimate import Estimate, estimate
from asyncpp_cli.planner.fsdp import sharded_run
from asyncpp_cli.planner.layouts import RECOMPUTE
from asyncpp_cli.planner.memory import GB
from asyncpp_cli.planner.sharding import memory_of_run
from asyncpp_cli.planner.shared import CostModel
from asyncpp_cli.runs.settings import items
from asyncpp_cli.sites.profile import Site
from asyncpp_cli.sites.resources import ranks_of
from stages.config.run_config import RunConfig
from stages.config.segments import as_data_ranks, is_sharded

DEFAULT_GPU = "h100"
"""GPU that a model alone is planned for, and whose times order layouts where nobody names one."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a plan assumes of the machine that a run trains on."""

    config: RunConfig
    """The run's. Its section `site` says what memory and times are of: `device` is `cuda` or `cpu`."""
    costs: Roofline | Measured
    times_known: bool
    """Whether the costs are those of the machine, since a GPU is named or they were measured."""
    limit_gb: float | None
    """Memory of a rank, 10^9 bytes; None: not known."""


def planned_machine(
    config: RunConfig,
    *,
    source: str = "",
    device: str | None = None,
    site: Site | None = None,
    profile: Measured | None = None,
    default: str | None = None,
) -> Machine:
    """The machine to plan a run for: a GPU, unless `site.device` is `cpu`, the site's nodes have no GPUs, or
    the profile was measured on a CPU.

    Args:
        config: the run's.
        source: of the configuration, for messages.
        device: GPU that is asked for (`--device`): before what site and configuration name.
        site: profile whose settings replace those of the configuration.
        profile: measured times.
        default: GPU where nobody names one.

    Raises:
        UserError: the GPU that is named is not known.
    """
    settings = {} if site is None else _device_of(site)
    planned = replace(config.site, **settings)
    key = f"{source}: site.gpu" if source else "site.gpu"
    if site is not None and "gpu" in settings:
        key = f"{site.file}: run.gpu"
    if device is not None:
        key = "--device"
        planned = replace(planned, device="cuda", gpu=device, memory_gb=settings.get("memory_gb"))
    on_cpu = planned.device == "cpu" if profile is None else profile.threads is not None
    named = None if on_cpu else planned.gpu or default
    gpu = find_device(named or planned.gpu or DEFAULT_GPU, key=key)
    if site is not None and site.gpus_per_node:
        gpu = gpu.in_nodes(site.gpus_per_node)
    planned = replace(planned, device="cpu" if on_cpu else "cuda", gpu=named)
    limit = planned.memory_gb
    return Machine(
        config=replace(config, site=planned),
        costs=profile or Roofline(gpu),
        times_known=named is not None or profile is not None,
        limit_gb=gpu.usable_gb if limit is None and named is not None else limit,
    )


def _device_of(site: Site) -> dict[str, Any]:
    """Settings of the section `site` by which a profile says what its ranks run on."""
    keys = ("device", "memory_gb", "gpu", "threads")
    found = {key: value for key, value in site.run.items() if key in keys}
    if site.scheduler == "slurm" and not site.gpus_per_node and not found.keys() & {"device", "gpu"}:
        found["device"] = "cpu"
    return found


@dataclass(frozen=True)
class Expected:
    """Estimate for a cell; None where it is not known."""

    memory_gb: float | None
    """Memory of its fullest rank, 10^9 bytes; None for a model of the user's own."""
    step_seconds: float | None
    """None also where neither `site.gpu` nor a profile tells it."""
    threads: int | None = None
    """Cores of a rank whose times were measured on a CPU; None: the times are those of a GPU."""

    def gpu_hours(self, config: RunConfig, *, steps: int) -> float | None:
        """GPU-hours of these steps on one GPU per rank: training alone, without starts and evaluations."""
        return None if self.threads is not None else self._rank_hours(config, steps)

    def core_hours(self, config: RunConfig, *, steps: int) -> float | None:
        """Core-hours of these steps on CPUs: hours times the cores of all ranks; None on GPUs."""
        hours = self._rank_hours(config, steps)
        return None if self.threads is None or hours is None else hours * self.threads

    def _rank_hours(self, config: RunConfig, steps: int) -> float | None:
        if self.step_seconds is None:
            return None
        return self.step_seconds * steps * ranks_of(config) / 3600


def expected(
    source: str,
    cells: Sequence[ResolvedCell],
    *,
    site: Site | None,
    profiles: Sequence[Measured] = (),
) -> list[Expected]:
    """Estimate every cell.

    Args:
        source: the template, for messages.
        cells: valid cells.
        site: profile whose settings replace the cells' own.
        profiles: measured times; a cell takes the first one that was measured for it.

    Raises:
        UserError: a cell is refused, or its GPU is not known.
    """
    estimates: dict[str, Expected] = {}
    of_cells = []
    for resolved in cells:
        machine = planned_machine(resolved.config, source=source, site=site)
        if profile := next((profile for profile in profiles if profile.is_for(machine.config)), None):
            machine = planned_machine(machine.config, source=source, profile=profile)
        key = estimate_key(machine.config)
        if key not in estimates:
            estimates[key] = _expected(source, resolved, machine)
        of_cells.append(estimates[key])
    return of_cells


def estimate_key(config: RunConfig) -> str:
    """The settings that the estimate depends on: all but those that change neither memory nor time."""
    effective = [(key, value) for key, value in items(config) if key not in _WITHOUT_EFFECT]
    return repr([*effective, config.data.path if config.data.document_mask else None])


_WITHOUT_EFFECT = frozenset(
    f"{section}.{name}"
    for section, names in {
        "optimizer": "lr weight_decay warmup final_lr schedule decay_share",
        "model": "name init init_sha256",
        "data": "path sha256 validation_share headline",
        "train": "steps eval_interval eval_microbatches eval_tokens clip_norm max_skipped "
        "checkpoint_interval profile_steps",
        "site": "timeout start_timeout grace save_timeout keep_checkpoints peak_tflops",
    }.items()
    for name in names.split()
) | {"seed"}
"""Learning rate and decay, for example; other options of an optimizer may have one. Of a key that is missing
here the estimates are only made more often."""


def _expected(source: str, resolved: ResolvedCell, machine: Machine) -> Expected:
    config, costs = machine.config, machine.costs
    if config.model.factory is not None:
        return Expected(None, None)
    limit = config.site.memory_gb
    if is_sharded(config):
        gb = sum(memory_of_run(config).values()) / GB
        if limit is not None and gb > limit:
            raise UserError(
                f"{source}: site.memory_gb: a process needs {gb:.1f} GB and a device has {limit:g} "
                f"(cell {describe(resolved.cell.axes)}); `asyncpp plan` shows layouts that fit"
            )
        return Expected(gb, _sharded_seconds(config, costs) if machine.times_known else None, costs.threads)
    planned = estimate(config, costs, limit_gb=None)
    seconds = planned.step.seconds if machine.times_known else None
    if limit is not None and planned.memory_gb > limit:
        raise UserError(
            f"{source}: site.memory_gb: {_excess(planned, limit)} "
            f"(cell {describe(resolved.cell.axes)}); {_advice(config, costs, limit)}"
        )
    return Expected(planned.memory_gb, seconds, costs.threads)


def _sharded_seconds(config: RunConfig, costs: Roofline | Measured) -> float:
    """Seconds of a step of a run that `is_sharded`; measured costs have no exchanges."""
    if isinstance(costs, Roofline):
        return sharded_run(config, costs).seconds
    return estimate(as_data_ranks(config), costs, limit_gb=None).step.seconds


def _excess(planned: Estimate, limit: float) -> str:
    sizes = planned.rank_gb
    rank = max(range(len(sizes)), key=sizes.__getitem__)
    kinds = sorted(planned.memory[rank].items(), key=lambda item: -item[1])
    largest = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in kinds[:4])
    return f"rank {rank} needs {sizes[rank]:.1f} GB ({largest}) and a device has {limit:g}"


def _advice(config: RunConfig, costs: CostModel, limit: float) -> str:
    for change, changed in _changes(config):
        planned = estimate(changed, costs, limit_gb=limit)
        if planned.memory_gb <= limit:
            cut = list(planned.cut)
            default = estimate(changed, costs, limit_gb=None)
            cut_change = f"parallel.cut: {cut}" if planned.cut != default.cut else ""
            return f"it would fit with {' and '.join(filter(None, (change, cut_change)))}"
    return "`asyncpp plan` shows layouts that fit"


def _changes(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Changes that save memory, the least intrusive first."""
    yield "", config
    if config.schedule.ahead > 1:
        yield "schedule.ahead: 1", replace(config, schedule=replace(config.schedule, ahead=1))
    more = RECOMPUTE[RECOMPUTE.index(config.train.recompute) + 1 :]
    for recompute in more:
        changed = replace(config.train, recompute=recompute)
        yield f"train.recompute: {recompute}", replace(config, train=changed)
    if config.train.microbatch_size > 1:
        train = replace(config.train, microbatch_size=1)
        yield "train.microbatch_size: 1", replace(config, train=train)
        for recompute in more:
            yield (
                f"train.microbatch_size: 1, train.recompute: {recompute}",
                replace(config, train=replace(train, recompute=recompute)),
            )
