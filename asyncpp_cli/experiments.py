"""An experiment's folder from a template's cells: made at once, or added to."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from asyncpp_cli.errors import UserError
from asyncpp_cli.files import usual_mask
from asyncpp_cli.matrix import ResolvedCell
from asyncpp_cli.runs import EXPERIMENT_FILE, Experiment, open_experiment, write_experiment
from asyncpp_cli.settings import config_text
from asyncpp_cli.template_file import Template, text_of


@dataclass(frozen=True)
class Rendered:
    """An experiment's folder, and how many cells were new to it."""

    experiment: Experiment
    added: int


def render(template: Template, cells: list[ResolvedCell], *, template_name: str, folder: Path) -> Rendered:
    """Write the experiment, or add to it the cells that it lacks. Runs that are there are left as they are.

    Raises:
        UserError: the folder holds something else, or an experiment with other cells.
    """
    experiment = Experiment(
        folder=folder,
        name=template.name,
        template=template_name,
        cells=tuple(resolved.cell for resolved in cells),
    )
    there = _contents(experiment)
    added = [resolved for resolved in cells if resolved.cell.id not in there]
    try:
        if there:
            _write(experiment, added, template)
        else:
            _make(experiment, added, template)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror})") from error
    return Rendered(experiment, len(added))


def _contents(wanted: Experiment) -> frozenset[str]:
    """Ids of the cells that the folder already has."""
    folder = wanted.folder
    if not folder.exists():
        return frozenset()
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder for the experiment")
    if not any(folder.iterdir()):
        return frozenset()
    if not (folder / EXPERIMENT_FILE).exists():
        raise UserError(f"{folder} holds something other than an experiment; name a new or empty folder")
    held = open_experiment(folder)
    there = frozenset(cell.id for cell in held.cells)
    if foreign := there - {cell.id for cell in wanted.cells}:
        raise UserError(
            f"{folder} holds another experiment: {len(foreign)} of its {len(there)} cells are not among the "
            f"{len(wanted.cells)} of this one ({min(foreign)}); name another folder"
        )
    return there


def _make(experiment: Experiment, cells: list[ResolvedCell], template: Template) -> None:
    """Make the folder beside its place and move it there: it is never seen half made."""
    parent = experiment.folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{experiment.folder.name}.", dir=parent))
    try:
        making.chmod(0o777 & ~usual_mask())
        staged = Experiment(
            folder=making, name=experiment.name, template=experiment.template, cells=experiment.cells
        )
        _write(staged, cells, template)
        making.replace(experiment.folder)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def _write(experiment: Experiment, cells: list[ResolvedCell], template: Template) -> None:
    for resolved in cells:
        run = experiment.run(resolved.cell.id)
        run.folder.mkdir(parents=True, exist_ok=True)
        run.config_file.write_text(config_text(resolved.config), encoding="utf-8")
    experiment.template_file.write_text(text_of(template), encoding="utf-8")
    # Last: a cell that the description names has its run.
    write_experiment(experiment)
