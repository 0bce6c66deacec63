"""`asyncpp train`: one rank of a run, or with --replay all of them. What a job runs."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncpp_cli.errors import UserError

if TYPE_CHECKING:
    from asyncpp_cli.cluster.attempts import Attempt
    from asyncpp_cli.cluster.place import Place
    from asyncpp_cli.runs import Run
    from stages.config import RunConfig


def train(
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder of the run, EXPERIMENT/runs/ID.")
    ],
    replay: Annotated[
        bool, typer.Option("--replay", help="All ranks take turns in this process: the same numbers.")
    ] = False,
) -> None:
    """Train one run: what `launch` starts for every rank, and what torchrun can start.

    It resumes from the newest valid checkpoint in RUN_DIR. SIGTERM or SIGUSR2 to any of its processes makes
    all of them save and end with exit code 75: to be resumed.

    With torchrun: torchrun --nproc-per-node RANKS -m asyncpp_cli train RUN_DIR.
    """
    from asyncpp_cli.cluster.place import find_place, taking_part
    from asyncpp_cli.cluster.resources import ranks_of
    from asyncpp_cli.errors import DamagedError
    from asyncpp_cli.run_data import config_to_train
    from asyncpp_cli.runs import open_run
    from stages.check import ConfigError, check
    from stages.signals import RESUMABLE

    run = open_run(run_folder)
    try:
        config = config_to_train(run)
        check(config)
    except DamagedError as error:
        raise UserError(str(error)) from error
    except ConfigError as error:
        raise UserError(f"{run.config_file}: {error.key}: {error.message}") from error
    place = find_place()
    processes = 1 if replay else ranks_of(config)
    if place.size != processes:
        raise UserError(_wrong_number(run_folder, processes=processes, there=place.size, replay=replay))
    code = 0
    try:
        with taking_part(run, place, replay=replay, steps=config.train.steps) as attempt:
            _train(run, config, attempt, place, replay=replay)
    except SystemExit as leaving:
        if leaving.code != RESUMABLE:
            raise
        code = RESUMABLE
    if place.supervised or place.size > 1:
        _leave(code)
    raise typer.Exit(code)


def _train(run: Run, config: RunConfig, attempt: Attempt, place: Place, *, replay: bool) -> None:
    """Train as one process of an attempt.

    Raises:
        SystemExit: with `RESUMABLE`, where the run was told to end and has saved.
    """
    from asyncpp_cli.recorder import RunRecorder
    from asyncpp_cli.step_lines import StepLines
    from stages.signals import RESUMABLE, listening

    config.site = replace(config.site, **attempt.site_settings)

    def give_up(message: str) -> None:
        attempt.rank_erred(place.rank, TimeoutError(message))
        if not place.supervised:
            attempt.rank_ended(place.rank, code=1, signal_number=None, stopped=False)
        _leave(1)

    with listening(patient=place.supervised) as stop:
        from stages import trainer
        from stages.device_settings import DeviceSettingError
        from stages.process import connected

        recorder = RunRecorder(run, attempt=attempt.number, lines=StepLines(steps=config.train.steps))
        settings: dict[str, Any] = {
            "recorder": recorder,
            "checkpoints": run.checkpoints,
            "text_folder": run.folder / "text",
            "stop": stop,
            "on_stall": give_up,
        }
        try:
            if replay:
                result = trainer.replay(config, **settings)
            else:
                with connected(
                    rank=place.rank,
                    size=place.size,
                    local_rank=place.local_rank,
                    local_size=place.local_size,
                    rendezvous=attempt.rendezvous,
                    site=config.site,
                ) as process:
                    result = trainer.train(config, process=process, **settings)
        except SystemExit as leaving:
            if stop():
                raise
            # A model of the user's own may do this; its exit code is no word on the run.
            raise RuntimeError(
                f"the run's own code ended the process (SystemExit: {leaving.code})"
            ) from leaving
        except DeviceSettingError as error:
            raise UserError(str(error)) from error
        finally:
            recorder.close()
    if result.stopped_at is not None:
        print(f"told to end: saved after step {result.stopped_at}", file=sys.stderr)
        raise SystemExit(RESUMABLE)


def _leave(code: int) -> None:
    """End a process whose run is recorded, without the interpreter's own end.

    Threads of torch's that still want the interpreter then abort the process now and then ("terminate called
    without an active exception"), and a run that is completed would be taken for failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wrong_number(folder: Path, *, processes: int, there: int, replay: bool) -> str:
    from asyncpp_cli.console import quoted

    if replay:
        return f"--replay runs all ranks in one process, but there are {there}: start it alone"
    return (
        f"{folder} has {processes} ranks, one process each, but there is {there}: start it with "
        f"`asyncpp launch` on its experiment, or with --replay, "
        f"or `torchrun --nproc-per-node {processes} -m asyncpp_cli train {quoted(folder)}`"
    )
