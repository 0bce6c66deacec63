"""From a template to an experiment's folder, as `asyncpp sweep` does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncpp_cli.experiment.matrix import ResolvedCell
    from asyncpp_cli.experiment.render import Rendered
    from asyncpp_cli.experiment.template import Template
    from asyncpp_cli.planner.cells import Expected


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The checked cells of a template, and what was written of them."""

    template: Template
    cells: list[ResolvedCell]
    expected: list[Expected] | None
    """Memory and step time expected of each cell; None: nobody asked for them."""
    rendered: Rendered | None
    """None: the cells were only checked."""


def sweep_template(
    template: str,
    changes: Sequence[str],
    *,
    out: Path | None,
    site: str | None,
    allow_code: Sequence[str] | str = (),
    profiles: Sequence[Path] = (),
    plan: bool = False,
) -> Sweep:
    """Check every cell of a template and write them as an experiment.

    Args:
        template: name of a shipped template, or a file.
        changes: `KEY=VALUE` for all cells.
        out: the experiment's folder, new or to be extended; None: only check.
        site: site profile whose GPUs every cell must fit; None: any.
        allow_code: modules of the user's own that the template may name.
        profiles: files of `asyncpp plan --measure`, for the times of the cells that they were measured for.
        plan: estimate memory and time of every cell. They are estimated anyway where a check or a cost needs
            them: with a site, a profile, or a cell's `site.memory_gb` or `site.gpu`.

    Raises:
        UserError: the template, a cell or the folder is not accepted; nothing is written.
    """
    from asyncpp_cli.experiment.cell_checks import check_cells
    from asyncpp_cli.experiment.matrix import expand
    from asyncpp_cli.experiment.own_code import confirmed
    from asyncpp_cli.experiment.render import render
    from asyncpp_cli.experiment.template import load

    loaded = load(template, changes)
    cells = expand(loaded, confirmed=confirmed(allow_code, changes, out=out))
    check_cells(loaded, cells)
    on_gpus = [cell.config.site.memory_gb or cell.config.site.gpu for cell in cells]
    costs = None
    if plan or site is not None or profiles or any(on_gpus):
        costs = _expected(loaded.source, cells, site=site, files=profiles)
    rendered = None if out is None else render(loaded, cells, template_name=template, folder=out)
    return Sweep(template=loaded, cells=cells, expected=costs, rendered=rendered)


def _expected(
    source: str, cells: Sequence[ResolvedCell], *, site: str | None, files: Sequence[Path]
) -> list[Expected]:
    """The planner, imported where it is needed alone: it takes longer than all else."""
    from asyncpp_cli.planner.cells import expected
    from asyncpp_cli.planner.costs.profile_costs import read_profile
    from asyncpp_cli.sites.profile import find_site
    from asyncpp_cli.sites.resources import this_machine

    profiles = [read_profile(file) for file in files]
    if site is None and not profiles and not this_machine().gpus:
        # Here runs that name no GPU train on the CPU, and take the memory that they take there.
        cells = [_on_cpu(each) for each in cells]
    return expected(source, cells, site=None if site is None else find_site(site), profiles=profiles)


def _on_cpu(resolved: ResolvedCell) -> ResolvedCell:
    """A cell on this machine's CPU if it leaves the device open and names no GPU."""
    site = resolved.config.site
    if site.device != "auto" or site.gpu is not None or site.memory_gb is not None:
        return resolved
    return replace(resolved, config=replace(resolved.config, site=replace(site, device="cpu")))
