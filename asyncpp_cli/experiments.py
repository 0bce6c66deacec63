"""An experiment's folder from a template's cells: made at once, added to, or restored."""

from __future__ import annotations

import errno
import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from asyncpp_cli.errors import DamagedError, UserError, doing
from asyncpp_cli.files import usual_mask, write_text
from asyncpp_cli.held_runs import as_held, check_same_data, note_locations
from asyncpp_cli.matrix import ResolvedCell
from asyncpp_cli.runs import EXPERIMENT_FILE, Experiment, Run, open_experiment, write_experiment
from asyncpp_cli.settings import config_text
from asyncpp_cli.template_file import Template, text_of

_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)

_SECONDS_TO_WAIT = 120.0
"""For another process that writes the same experiment."""


@dataclass(frozen=True)
class Rendered:
    """An experiment's folder, and what was done to it."""

    experiment: Experiment
    added: int
    """Cells that it lacked."""
    restored: tuple[str, ...]
    """Runs that it had, and whose folder or configuration was gone or damaged."""


def render(template: Template, cells: list[ResolvedCell], *, template_name: str, folder: Path) -> Rendered:
    """Write the experiment, or add to it what it lacks. Runs that are there are left as they are.

    Of an experiment that has all these cells and more, only the runs of these cells are restored.

    Raises:
        UserError: the folder holds something else, or an experiment with other cells.
        OSError: it cannot be written.
    """
    wanted = Experiment(
        folder=folder,
        name=template.name,
        template=template_name,
        cells=tuple(resolved.cell for resolved in cells),
    )
    if _is_free(folder) and _make(wanted, cells, template):
        return Rendered(wanted, len(cells), ())
    return _add(wanted, cells, template)


def _is_free(folder: Path) -> bool:
    """Whether an experiment can be made there.

    Raises:
        UserError: there is something other than an experiment.
    """
    if not folder.exists():
        return True
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder for the experiment")
    if not any(folder.iterdir()):
        return True
    if not (folder / EXPERIMENT_FILE).exists() and not _lost_its_description(folder):
        raise UserError(f"{folder} holds something other than an experiment; name a new or empty folder")
    return False


def _lost_its_description(folder: Path) -> bool:
    """Whether this is an experiment but for experiment.json."""
    return (folder / "template.yaml").is_file() and (folder / "runs").is_dir()


def _make(experiment: Experiment, cells: list[ResolvedCell], template: Template) -> bool:
    """Make the folder beside its place and move it there, so that it is never seen half made.

    Returns:
        False if another process has put something into that place meanwhile.
    """
    parent = experiment.folder.absolute().parent
    with doing("made", experiment.folder):
        parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f".{experiment.folder.name[:40]}.", dir=parent))
    try:
        making.chmod(0o777 & ~usual_mask())
        staged = Experiment(
            folder=making, name=experiment.name, template=experiment.template, cells=experiment.cells
        )
        for resolved in cells:
            _write_run(staged.run(resolved.cell.id), resolved)
        _write_description(staged, template)
        making.replace(experiment.folder)
    except BaseException as error:
        shutil.rmtree(making, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _add(wanted: Experiment, cells: list[ResolvedCell], template: Template) -> Rendered:
    """Add to the experiment in the folder what it lacks of these cells."""
    _is_free(wanted.folder)  # refuses a folder of something else, before a lock is put into it
    with _alone(wanted.folder):
        if (wanted.folder / EXPERIMENT_FILE).is_file():
            there = open_experiment(wanted.folder)
            cells = as_held(cells, there)
            wanted = replace(wanted, cells=tuple(resolved.cell for resolved in cells))
            check_same_data(cells, there)
            note_locations(cells, there)
        held = _held(wanted)
        ids = {cell.id for cell in wanted.cells}
        foreign = held - ids
        added = [resolved for resolved in cells if resolved.cell.id not in held]
        if foreign and added:
            raise UserError(
                f"{wanted.folder} holds another experiment: {len(foreign)} of its {len(held)} cells are not "
                f"among the {len(ids)} of this one ({min(foreign)}), nor {len(added)} of this one among its; "
                "name another folder, or a template that has the cells of both"
            )
        restored = []
        for resolved in cells:
            run = wanted.run(resolved.cell.id)
            if resolved.cell.id not in held:
                _write_run(run, resolved)
            elif _restored(run, resolved):
                restored.append(run.id)
        if foreign:
            return Rendered(open_experiment(wanted.folder), 0, tuple(restored))
        # Last: a cell that the description names has its run.
        _write_description(wanted, template)
        _check_written(wanted)
    return Rendered(wanted, len(added), tuple(restored))


def _held(wanted: Experiment) -> frozenset[str]:
    """Ids of the cells that the folder has."""
    try:
        return frozenset(cell.id for cell in open_experiment(wanted.folder).cells)
    except UserError:
        if (wanted.folder / EXPERIMENT_FILE).exists():
            raise
    # The description was removed: what there are runs of.
    return frozenset(file.parent.name for file in wanted.folder.glob("runs/*/config.yaml"))


def _restored(run: Run, resolved: ResolvedCell) -> bool:
    """Write the configuration of a run that has lost it; whether that was so. A damaged one stays beside."""
    try:
        run.config()
    except DamagedError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno not in _NO_FILE:
            raise UserError(
                str(error)
            ) from error  # it may be as it should, behind a permission or a bad disk
        if run.config_file.is_symlink() or run.config_file.exists():
            run.config_file.replace(run.config_file.with_name(f"config.yaml.damaged-{time.time_ns()}"))
        _write_run(run, resolved)
        return True
    return False


def _write_run(run: Run, resolved: ResolvedCell) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    write_text(run.config_file, config_text(resolved.config))


def _write_description(experiment: Experiment, template: Template) -> None:
    write_text(experiment.template_file, text_of(template))
    write_experiment(experiment)


def _check_written(experiment: Experiment) -> None:
    """Refuse to say that cells were added which another process has written over.

    That cannot be where locks hold. Some shared filesystems accept them and do not keep them.
    """
    there = {cell.id for cell in open_experiment(experiment.folder).cells}
    if lost := [cell.id for cell in experiment.cells if cell.id not in there]:
        raise UserError(
            f"{experiment.folder}: another process wrote the experiment at the same time, and {len(lost)} "
            f"cells of this one are not in it ({lost[0]}); run this command again"
        )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from writing the experiment, from before it is read until it is written.

    Raises:
        UserError: another process has held the lock for too long.
    """
    with (folder / "lock").open("a") as file:
        deadline = time.monotonic() + _SECONDS_TO_WAIT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(f"{folder}: another process is writing this experiment") from None
                time.sleep(0.05)
            except OSError:
                break  # a filesystem without locks: what was written is read again
        yield
