"""`asyncpp train`: trains one rank of a run, or all of them with --replay."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.commands.arguments import OneRun
from stages.config.torch_process import importing_torch, leave

if TYPE_CHECKING:
    from asyncpp_cli.launch.common.rank_env import RankEnv
    from asyncpp_cli.runs.attempts.attempt import Attempt
    from asyncpp_cli.runs.run_folder import Run
    from stages.config.run_config import RunConfig
    from stages.training_loop import TrainingResult


def train(
    run_folder: OneRun,
    replay: Annotated[
        bool, typer.Option("--replay", help="Run all ranks in this process, taking turns; same numbers.")
    ] = False,
) -> None:
    """Train one run. `launch` starts this for every rank, and torchrun can.

    Resumes from the newest valid checkpoint of its folder. On SIGTERM or SIGUSR2 to any of its processes all
    of them save and exit with code 75; training can then be resumed.

    With torchrun: torchrun --nproc-per-node RANKS -m asyncpp_cli train DIR/RUN. More: docs/anywhere.md.
    """
    from asyncpp_cli.base.console import say
    from asyncpp_cli.experiment.run_data import config_to_train, naming_config, owners_of
    from asyncpp_cli.launch.common.rank_env import read_rank_env
    from asyncpp_cli.launch.joining import CompletedError, attempt_of_rank
    from asyncpp_cli.runs.experiment_folder import run_at
    from asyncpp_cli.sites.resources import ranks_of
    from stages.liveness.stop_signal import RESUMABLE
    from stages.resolve.checks import check

    run = run_at(run_folder)
    config = config_to_train(run)
    with naming_config(run):
        check(config)
    lineage, owners = run.lineage(), owners_of(run)
    if lineage is not None and (run.saved_step or 0) < lineage.step:
        raise UserError(f"{run.folder} {lineage.text}, and has no checkpoint of it any more")
    processes = 1 if replay else ranks_of(config)
    rank_env = read_rank_env()
    if rank_env.size != processes:
        raise UserError(
            _wrong_size(run_folder, run, processes=processes, actual=rank_env.size, replay=replay)
        )
    code = 0
    try:
        with attempt_of_rank(run, rank_env, replay=replay, config=config) as (attempt, rank_env):
            checkpoints = {
                "checkpoints": run.checkpoints,
                "continues_from": 0 if lineage is None else lineage.step,
                "owners": owners,
            }
            _train(run, config, attempt, rank_env, replay=replay, checkpoints=checkpoints)
    except CompletedError as completed:
        say(str(completed))
    except SystemExit as leaving:
        if leaving.code != RESUMABLE:
            raise
        # Whoever started this rank would start it again.
        cancelled = not rank_env.supervised and _is_cancelled(attempt)
        code = 0 if cancelled else RESUMABLE
    if rank_env.supervised or rank_env.size > 1:
        leave(code)
    raise typer.Exit(code)


def _train(
    run: Run,
    config: RunConfig,
    attempt: Attempt,
    rank_env: RankEnv,
    *,
    replay: bool,
    checkpoints: dict[str, Any],
) -> None:
    """Train as one process of an attempt.

    Raises:
        SystemExit: with `RESUMABLE`, after saving on a request to stop.
    """
    from asyncpp_cli.runs.attempts.claims import record_processes
    from asyncpp_cli.runs.attempts.recorder import RunRecorder, StepLines
    from asyncpp_cli.runs.attempts.settle import end_rank
    from stages.liveness.stop_signal import RESUMABLE, listening
    from stages.liveness.watchdog import set_flight_recorder, write_operations

    config = replace(config, site=attempt.site())

    set_flight_recorder(os.environ, folder=attempt.folder)

    def give_up(message: str) -> None:
        write_operations(attempt.folder / f"rank-{rank_env.rank}.nccl.json")
        attempt.record_error(rank_env.rank, TimeoutError(message))
        if not rank_env.supervised:
            end_rank(attempt, rank_env.rank, code=1, signal_number=None, stopped=False)
        leave(1)

    with listening(patient=rank_env.supervised) as stop:
        if not rank_env.supervised:
            stop = _signalled_or_requested(attempt, stop)
        with importing_torch():
            from stages import trainer

        recorder = RunRecorder(run, attempt=attempt.number, lines=StepLines(steps=config.train.steps))
        settings: dict[str, Any] = {
            "recorder": recorder,
            **checkpoints,
            "until": attempt.until,
            "text_folder": run.folder / "text",
            "stop": stop,
            "on_stall": give_up,
        }
        with _told(run, config, stop):
            try:
                if replay:
                    record_processes(attempt, [os.getpid()])
                    result = trainer.replay(config, **settings)
                else:
                    result = _trained_together(config, attempt, rank_env, settings)
            finally:
                recorder.close()
    if result.stopped_at is not None:
        print(f"stopped on request: saved after step {result.stopped_at}", file=sys.stderr)
        raise SystemExit(RESUMABLE)


def _trained_together(
    config: RunConfig, attempt: Attempt, rank_env: RankEnv, settings: dict[str, Any]
) -> TrainingResult:
    """The result of training with the processes of the other ranks."""
    from asyncpp_cli.runs.attempts.claims import record_processes
    from stages import trainer
    from stages.comm.process import connected
    from stages.config.segments import as_trained

    with connected(
        rank=rank_env.rank,
        size=rank_env.size,
        local_rank=rank_env.local_rank,
        local_size=rank_env.local_size,
        rendezvous=attempt.rendezvous,
        site=config.site,
        data_ranks=as_trained(config).parallel.data,
    ) as process:
        if process.rank == 0:
            record_processes(attempt, process.pids)
        return trainer.train(
            config,
            process=process,
            dump_folder=attempt.folder,
            on_wait=partial(attempt.record_waiting, rank_env.rank),
            **settings,
        )


@contextmanager
def _told(run: Run, config: RunConfig, stop: Callable[[], bool]) -> Iterator[None]:
    """Tell errors of training that are no bugs of asyncpp as mistakes: of the machine, files or own code."""
    from asyncpp_cli.base.console import command
    from asyncpp_cli.experiment.own_code import mistake_in_own_code
    from stages.checkpoint.files import FormatError, LostCheckpointError
    from stages.comm.device_settings import DeviceSettingError
    from stages.config.own_code import raised_in

    try:
        yield
    except SystemExit as leaving:
        if stop():
            raise
        # Raised by user code, such as a custom model; its exit code says nothing about the run.
        place = raised_in(leaving, config)[1]
        raise UserError(
            f"the run's own code ended the process (SystemExit: {leaving.code}){place}"
        ) from leaving
    except LostCheckpointError as error:
        repair = command("launch", run.folder.parents[1] / run.id)
        raise UserError(f"{error}; where metrics are lost, {repair} starts again before that") from error
    except (DeviceSettingError, FormatError) as error:
        raise UserError(str(error)) from error
    except Exception as error:
        if (mistake := mistake_in_own_code(error, config)) is None:
            raise
        raise mistake from error


_SECONDS_BETWEEN_POLLS = 1.0


def _signalled_or_requested(attempt: Attempt, signalled: Callable[[], bool]) -> Callable[[], bool]:
    """A stop condition that also holds once the attempt has a stop request, which no supervisor passes on."""
    requested = threading.Event()

    def poll() -> None:
        # In a thread, since a file server may be slow to answer.
        while not requested.wait(_SECONDS_BETWEEN_POLLS):
            if attempt.stop_reason is not None:
                requested.set()

    threading.Thread(target=poll, daemon=True, name="stop requests").start()
    return lambda: signalled() or requested.is_set()


def _is_cancelled(attempt: Attempt) -> bool:
    from asyncpp_cli.runs.attempts.files import StopRequest
    from asyncpp_cli.runs.status import Cause

    request = attempt.read(StopRequest)
    return request is not None and request.cause == Cause.CANCELLED


def _wrong_size(folder: Path, run: Run, *, processes: int, actual: int, replay: bool) -> str:
    from asyncpp_cli.base.console import command, quoted

    if replay:
        return f"--replay runs all ranks in one process, but there are {actual}: start it alone"
    return (
        f"{folder} has {processes} ranks, one process each, but there is {actual}: start it with "
        f"`{command('launch', run.folder.parents[1] / run.id)}`, `{command('train', folder, '--replay')}` or "
        f"`torchrun --nproc-per-node {processes} -m asyncpp_cli train {quoted(folder)}`"
    )
