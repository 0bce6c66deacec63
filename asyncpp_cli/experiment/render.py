"""Writes the folder of an experiment: creates it at once, adds cells, or restores runs."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from asyncpp_cli.base.atomic_files import folder_at_once, real_folder, write_bytes, write_text
from asyncpp_cli.base.console import quoted, say
from asyncpp_cli.base.errors import DamagedError, UserError, doing
from asyncpp_cli.experiment.existing_cells import (
    check_same_data,
    record_locations,
    why_new,
    with_existing_ids,
)
from asyncpp_cli.experiment.matrix import ResolvedCell
from asyncpp_cli.experiment.own_code import CodeCopies
from asyncpp_cli.experiment.template import Template, text_of
from asyncpp_cli.runs.config_file import config_text
from asyncpp_cli.runs.experiment_folder import EXPERIMENT_FILE, Experiment, open_experiment, write_experiment
from asyncpp_cli.runs.run_folder import Run
from stages.config.own_code import named_code
from stages.config.records import read_text

_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)

_SECONDS_TO_WAIT = 120.0
"""For a lock held by another process."""


@dataclass(frozen=True)
class Rendered:
    """An experiment's folder, and the changes to it."""

    experiment: Experiment
    added: int
    """Number of new cells."""
    restored: tuple[str, ...]
    """Ids of runs whose folder or configuration was missing or damaged."""
    why_new: tuple[str, ...] = ()
    """The keys that make the ids of new cells new, where the folder had others."""


def render(template: Template, cells: list[ResolvedCell], *, template_name: str, folder: Path) -> Rendered:
    """Write the experiment, or add missing cells to it. Existing runs stay as they are.

    If the experiment has all these cells and more, only runs of these cells are restored.

    Args:
        template: the template.
        cells: its cells.
        template_name: as given by the user.
        folder: of the experiment.

    Raises:
        UserError: the folder holds something else, or an experiment with other cells.
        OSError: the folder cannot be written.
    """
    wanted = Experiment(
        folder=folder,
        name=template.name,
        template=template_name,
        cells=tuple(resolved.cell for resolved in cells),
        allowed_code=tuple(
            sorted({name for resolved in cells for name in named_code(resolved.config).values()})
        ),
    )
    if _is_free(folder) and _make(wanted, cells, template):
        if folder.stat().st_mode & stat.S_IWOTH:
            mend = f"umask 022, and chmod -R o-w {quoted(folder)}"
            say(f"note: everybody may write {folder}, and so run code as you: {mend}")
        return Rendered(wanted, len(cells), ())
    return _add(wanted, cells, template)


def _is_free(folder: Path) -> bool:
    """Whether the folder is new or empty.

    Raises:
        UserError: it holds something other than an experiment.
    """
    if not folder.exists():
        return True
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder for the experiment")
    if not any(folder.iterdir()):
        return True
    if not (folder / EXPERIMENT_FILE).exists() and not (
        # An experiment without its experiment.json.
        (folder / "template.yaml").is_file() and (folder / "runs").is_dir()
    ):
        raise UserError(f"{folder} holds something other than an experiment; name a new or empty folder")
    return False


def _make(experiment: Experiment, cells: list[ResolvedCell], template: Template) -> bool:
    """Create the folder under a temporary name and rename it, so that it never appears incomplete.

    Returns:
        False if another process has created something in its place meanwhile.
    """
    copies = CodeCopies()
    try:
        with folder_at_once(real_folder(experiment.folder)) as temporary:
            staged = replace(experiment, folder=temporary)
            hashed = tuple(
                structs.replace(
                    resolved.cell,
                    config_sha256=_write_run(
                        staged.run(resolved.cell.id), resolved, copies, write=Path.write_bytes
                    ),
                )
                for resolved in cells
            )
            _write_description(replace(staged, cells=hashed), template)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _add(wanted: Experiment, cells: list[ResolvedCell], template: Template) -> Rendered:
    """Add missing cells to the experiment in the folder."""
    _is_free(wanted.folder)  # refuses a folder of something else before a lock file is written into it
    with experiment_locked(wanted.folder):
        existing = None
        if (wanted.folder / EXPERIMENT_FILE).exists():
            existing = open_experiment(wanted.folder)
            existing_ids = {cell.id for cell in existing.cells}
            cells = with_existing_ids(cells, existing)
            wanted = replace(
                wanted,
                cells=tuple(resolved.cell for resolved in cells),
                allowed_code=tuple(sorted({*wanted.allowed_code, *existing.allowed_code})),
            )
            check_same_data(cells, existing)
            record_locations(cells, existing)
        else:  # it was removed: the runs tell
            existing_ids = {file.parent.name for file in wanted.folder.glob("runs/*/config.yaml")}
        ids = {cell.id for cell in wanted.cells}
        foreign = existing_ids - ids
        added = [resolved for resolved in cells if resolved.cell.id not in existing_ids]
        reasons = () if existing is None else tuple(why_new(added, existing))
        if foreign and added:
            why = "".join(f"; {reason}" for reason in reasons)
            raise UserError(
                f"{wanted.folder} holds another experiment: {len(foreign)} of its {len(existing_ids)} cells "
                f"are not among the {len(ids)} of this one ({min(foreign)}), and {len(added)} are new{why}; "
                "name another folder, or a template that has the cells of both"
            )
        restored = []
        copies = CodeCopies()
        for resolved in cells:
            run = wanted.run(resolved.cell.id)
            if resolved.cell.id not in existing_ids:
                _write_run(run, resolved, copies)
            elif _restored(run, resolved, copies):
                restored.append(run.id)
        if foreign:
            return Rendered(open_experiment(wanted.folder), 0, tuple(restored))
        # Written last, so that every cell in the description has its run.
        _write_description(wanted, template)
        _check_written(wanted)
    return Rendered(wanted, len(added), tuple(restored), reasons)


def _restored(run: Run, resolved: ResolvedCell, copies: CodeCopies) -> bool:
    """Rewrite a missing or damaged configuration, keeping the damaged file; returns whether it was so."""
    # To parse a thousand takes longer than to write them.
    with suppress(FileNotFoundError, DamagedError):  # found again below
        if read_text(run.config_file) == config_text(resolved.config):
            return False
    try:
        run.config()
    except DamagedError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno not in _NO_FILE:
            # It may be intact, behind a permission or a faulty disk.
            raise UserError(str(error)) from error
        if run.config_file.is_symlink() or run.config_file.exists():
            run.config_file.replace(run.config_file.with_name(f"config.yaml.damaged-{time.time_ns()}"))
        _write_run(run, resolved, copies)
        return True
    return False


def _write_run(
    run: Run,
    resolved: ResolvedCell,
    copies: CodeCopies,
    *,
    write: Callable[[Path, bytes], object] = write_bytes,
) -> str:
    """Write the run's folder; returns the SHA-256 of its configuration.

    In a folder that nobody sees before it is whole, `write` need not be atomic.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    copies.write(run, resolved.config)
    content = config_text(resolved.config).encode()
    with doing("written", run.config_file):
        write(run.config_file, content)
    return hashlib.sha256(content).hexdigest()


def _write_description(experiment: Experiment, template: Template) -> None:
    source = Path(template.source)
    # Sweeping again what it was resolved to does not replace the user's own text.
    if source.name != experiment.resolved_template.name or not experiment.own_template.is_file():
        own = source.read_bytes() if template.text is None else template.text.encode()
        write_bytes(experiment.own_template, own)
    write_text(experiment.resolved_template, text_of(template))
    write_experiment(experiment)


def _check_written(experiment: Experiment) -> None:
    """Check that no other process has overwritten the description: some shared filesystems ignore locks.

    Raises:
        UserError: cells are missing.
    """
    written = {cell.id for cell in open_experiment(experiment.folder).cells}
    if lost := [cell.id for cell in experiment.cells if cell.id not in written]:
        raise UserError(
            f"{experiment.folder}: another process wrote the experiment at the same time, and {len(lost)} "
            f"cells of this one are not in it ({lost[0]}); run this command again"
        )


@contextmanager
def experiment_locked(folder: Path) -> Iterator[None]:
    """Hold the experiment's lock, so that no other process writes it.

    Raises:
        UserError: another process holds the lock for too long.
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
                break  # a filesystem without locks; see `_check_written`
        yield
