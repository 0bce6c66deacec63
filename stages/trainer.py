"""Trains a run: as one of its processes, or with all ranks in one process (replay)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import torch

from stages.comm.process import Process, choose_device
from stages.comm.topology import connect, connect_in_process
from stages.config.run_config import RunConfig
from stages.config.segments import is_sharded, shards_of
from stages.liveness.watchdog import ActivityTracker, Waiting, watching
from stages.pipeline.torch_profile import memory_snapshot
from stages.resolve.facts import facts
from stages.training_loop import Kept, TrainingLoop, TrainingResult
from stages.weights.number_formats import dtypes


def train(
    config: RunConfig,
    *,
    process: Process,
    dump_folder: Path | None = None,
    on_stall: Callable[[str], None] | None = None,
    on_wait: Callable[[Waiting | None], None] = lambda waiting: None,
    **kept: Unpack[Kept],
) -> TrainingResult:
    """Train as one process of the run, which performs one rank. All processes pass the same configuration.

    Only the rank of the last stage of data rank 0, where the loss is computed, writes to `recorder`.

    Args:
        config: of the run.
        process: this one.
        dump_folder: where profiles, and memory snapshots after running out of it, are written; None: nowhere.
        on_stall: called in another thread after a stall: no progress for twice `site.timeout`, while reading
            or writing text or checkpoints for twice `site.save_timeout`, while building and compiling the
            model for twice `site.start_timeout`.
        on_wait: called in another thread with the message that this process has long waited for, and with
            None once it goes on.
        kept: the recorder, and what the run is given to go on from, to save into and to stop by.

    Raises:
        RuntimeError: a measured delay is not the program's, or another rank has ended.
        stages.checkpoint.files.LostCheckpointError: there is no valid checkpoint from `continues_from` on, or
            none that is whole fits the run.
        stages.training_loop.SkippedTooOftenError: no gradient was finite for `train.max_skipped` updates.
        stages.checkpoint.files.CheckpointError: a checkpoint cannot be written, or is of another format.
        stages.data.dataset.DataError: the text cannot be trained on.
    """
    shards = shards_of(config) if is_sharded(config) else None
    run = facts(config)
    doing = ActivityTracker(config.site)
    profile_file, snapshot_file = (
        dump_folder / f"rank-{process.rank}.{name}" if dump_folder is not None else None
        for name in ("profile.json", "memory.pickle")
    )
    with (
        deterministic(config.train.deterministic),
        watching(doing.last_activity, on_stall=on_stall, on_wait=on_wait),
        memory_snapshot(snapshot_file, with_history=config.train.profile_steps > 0),
    ):
        connection = connect(
            process,
            run.programs[0],
            shape=run.activation_shape,
            dtype=dtypes(config).replica,
            common_step=run.schedule.updates_together,
            shards=shards,
            neighbours=config.site.neighbours,
        )
        loop = TrainingLoop(
            run,
            connections=[connection],
            device=process.device,
            process=process,
            doing=doing,
            kept=kept,
            profile_file=profile_file,
        )
        return loop.run()


def replay(
    config: RunConfig, *, on_stall: Callable[[str], None] | None = None, **kept: Unpack[Kept]
) -> TrainingResult:
    """Train with all ranks taking turns in this process, to the same numbers bit for bit as `train`.

    Arguments and errors are those of `train`; there are no profiles.
    """
    run = facts(config)
    doing = ActivityTracker(config.site)
    with deterministic(config.train.deterministic), watching(doing.last_activity, on_stall=on_stall):
        loop = TrainingLoop(
            run,
            connections=connect_in_process(
                rank_of_stage=run.rank_of_stage,
                data_ranks=run.config.parallel.data,
            ),
            device=choose_device(config.site),
            process=None,
            doing=doing,
            kept=kept,
        )
        return loop.run()


WORKSPACE = ":4096:8"
"""cuBLAS workspace with which its matrix products are reproducible (cuBLAS, "Results reproducibility")."""


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """If `wanted`, make torch use deterministic kernels and refuse operators that have none. On a CPU this
    changes nothing: runs are deterministic there anyway."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    torch.use_deterministic_algorithms(True)
    # It would fill all newly allocated memory; nothing here reads memory that it has not written.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = fills
