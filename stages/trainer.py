"""Training a run: as one of its processes, or with all ranks in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stages.assemble import activation_shape, dtypes, has_common_step, representative_programs
from stages.config import RunConfig
from stages.connection import connect, connect_in_process
from stages.determinism import deterministic
from stages.metrics import Recorder
from stages.process import Process, choose_device
from stages.run import Run, RunResult
from stages.signals import never
from stages.watchdog import Doing, watching


def train(
    config: RunConfig,
    *,
    process: Process,
    recorder: Recorder,
    checkpoints: Path | None = None,
    text_folder: Path | None = None,
    stop: Callable[[], bool] = never,
    on_stall: Callable[[str], None] | None = None,
) -> RunResult:
    """Train as one process of the run's, a rank each. All call this with the same configuration.

    Only the rank of the last stage of data rank 0, which knows the loss, writes to `recorder`.

    Args:
        config: the run's.
        process: this rank's.
        recorder: keeps the run's measurements.
        checkpoints: folder to go on from, and to save into; None: the run starts anew and saves nothing.
        text_folder: where text is split if the user's cache folder cannot be written.
        stop: whether this rank has been told to end. If any has, all end after the same step, and save.
        on_stall: called, in another thread, when this process has begun nothing new for twice `site.timeout`;
            while it reads text or a checkpoint, or writes one, for twice `site.save_timeout`; while it builds
            the model, with a factory of the user's own for example, for ten times `site.timeout`.

    Raises:
        RuntimeError: a measured delay is not the program's, or another rank is gone.
        stages.run.SkippedTooOftenError: no gradient was finite for `train.max_skipped` updates.
        stages.checkpoint_files.CheckpointError: a checkpoint cannot be written, or is of another run.
        stages.corpus.DataError: the text cannot be trained on.
    """
    doing = _doing(config)
    with deterministic(config.train.deterministic), watching(doing.last_sign, on_stall=on_stall):
        connection = connect(
            process,
            rank_of_stage=representative_programs(config)[0].rank_of_stage,
            data_ranks=config.parallel.data,
            shape=activation_shape(config),
            dtype=dtypes(config).replica,
            common_step=has_common_step(config),
        )
        run = Run(
            config,
            connections=[connection],
            device=process.device,
            process=process,
            recorder=recorder,
            checkpoints=checkpoints,
            text_folder=text_folder,
            stop=stop,
            doing=doing,
        )
        return run.run()


def replay(
    config: RunConfig,
    *,
    recorder: Recorder,
    checkpoints: Path | None = None,
    text_folder: Path | None = None,
    stop: Callable[[], bool] = never,
    on_stall: Callable[[str], None] | None = None,
) -> RunResult:
    """Train with all ranks taking turns in this process: the same numbers, bit for bit, without a cluster.

    Arguments and errors are those of `train`.
    """
    doing = _doing(config)
    with deterministic(config.train.deterministic), watching(doing.last_sign, on_stall=on_stall):
        run = Run(
            config,
            connections=connect_in_process(
                rank_of_stage=representative_programs(config)[0].rank_of_stage,
                data_ranks=config.parallel.data,
            ),
            device=choose_device(config.site),
            process=None,
            recorder=recorder,
            checkpoints=checkpoints,
            text_folder=text_folder,
            stop=stop,
            doing=doing,
        )
        return run.run()


def _doing(config: RunConfig) -> Doing:
    site = config.site
    return Doing(timeout=site.timeout, save_timeout=site.save_timeout, start_timeout=site.start_timeout)
