"""Tuning every arm of a template with the same budget, as `asyncpp tune` does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.launch.common.options import LaunchOptions
from asyncpp_cli.launch.start import INTERRUPTED_CODE, confirmed, launch_locally

if TYPE_CHECKING:
    from asyncpp_cli.experiment.matrix import ResolvedCell
    from asyncpp_cli.experiment.template import Template
    from asyncpp_cli.runs.experiment_folder import Experiment
    from asyncpp_cli.sites.profile import Site
    from asyncpp_cli.tune.plan import Plan, Question


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A tuning before anything is written."""

    template: Template
    cells: list[ResolvedCell]
    plan: Plan


def planned(question: Question, *, allow_code: Sequence[str] | str = (), out: Path | None = None) -> Planned:
    """The cells and the plan of a tuning. Writes nothing.

    Args:
        question: what is tuned.
        allow_code: modules of the user's own that the template may name.
        out: folder of the experiment, which may be there; None: only plan.

    Raises:
        UserError: the template, a key or a value is not accepted.
    """
    from asyncpp_cli.experiment.matrix import check_cells, expand
    from asyncpp_cli.experiment.own_code import confirmed
    from asyncpp_cli.experiment.template import load
    from asyncpp_cli.tune.plan import plan_of, template_with_points
    from asyncpp_cli.tune.search import parse_over, points

    overs = [parse_over(text) for text in question.over]
    if not overs:
        raise UserError("nothing to tune over; accepted: --over KEY=RANGE, as in optimizer.lr=1e-4:1e-1:log")
    tried = points(overs, samples=question.samples, search_seed=question.search_seed)
    # Every candidate is judged by its own loss.
    template = replace(
        template_with_points(load(question.template, question.changes), tried), speed_steps=None
    )
    typed = (*question.changes, *question.over)
    cells = expand(template, confirmed=confirmed(allow_code, typed, out=out))
    check_cells(template, cells)
    return Planned(template=template, cells=cells, plan=plan_of(question, cells, tried))


def write_tuning(question: Question, *, out: Path, allow_code: Sequence[str] | str = ()) -> None:
    """Make the experiment of a tuning, or check that the folder holds this one.

    Raises:
        UserError: the question is not accepted, or the folder holds something else.
    """
    from asyncpp_cli.base.console import command
    from asyncpp_cli.experiment.render import render
    from asyncpp_cli.tune.plan import read_plan, write_plan

    known = read_plan(out)
    if known is not None and known.question != question:
        raise UserError(
            f"{out} holds another tuning ({described(known.question)}); name another folder, or go on with "
            f"it: {command('tune', out)}"
        )
    made = planned(question, allow_code=allow_code, out=out)
    rendered = render(made.template, made.cells, template_name=question.template, folder=out)
    if known is None:
        write_plan(rendered.experiment, made.plan)


def described(question: Question) -> str:
    """A question as it is asked on the command line."""
    parts = [question.template, *question.changes, *(f"--over {text}" for text in question.over)]
    parts.append(f"--samples {question.samples}")
    if question.search_seed is not None:
        parts.append(f"--search-seed {question.search_seed}")
    rungs = ",".join(f"{share:g}" for share in question.rungs)
    parts.append(f"--eta {question.eta} --rungs {rungs}" if rungs else "--grid")
    return " ".join(parts)


def go_on(folder: Path, options: LaunchOptions, *, promoting: bool = False) -> int:
    """Go on with a tuning until it is complete or nothing more can be trained; the exit code of `tune`.

    Args:
        folder: of the experiment.
        options: of the launches; `site`, `replay`, `max_parallel`, `retries` and `yes` count.
        promoting: whether this is the job on a cluster that follows an array (`tune.cluster`).

    Raises:
        UserError: the folder is not tuned, or a run, the site or an option is not accepted.
    """
    from asyncpp_cli.runs.experiment_folder import open_experiment
    from asyncpp_cli.sites.profile import LOCAL, find_site
    from asyncpp_cli.tune.plan import expected_steps, plan_in

    experiment, plan = open_experiment(folder), plan_in(folder)
    profile = find_site(options.site)
    if not (options.yes or promoting) and not confirmed(experiment, profile, expected_steps(plan)):
        return 1
    if profile.scheduler == LOCAL:
        if options.retries is not None:
            raise UserError(f"--retries is for clusters, and {options.site} is this machine")
        return _locally(experiment, plan, options)
    return _on_cluster(experiment, plan, profile, options, promoting=promoting)


def _on_cluster(
    experiment: Experiment, plan: Plan, site: Site, options: LaunchOptions, *, promoting: bool
) -> int:
    from asyncpp_cli.base.console import command, say
    from asyncpp_cli.launch.submission.sbatch import check_folder_name
    from asyncpp_cli.tune.cluster import submit_due

    check_folder_name(experiment.folder)
    if submit_due(experiment, plan, site, options, promoting=promoting) and not promoting:
        say(f"A job that follows each array promotes. Status: {command('status', experiment.folder)}")
    return 0


def _locally(experiment: Experiment, plan: Plan, options: LaunchOptions) -> int:
    from asyncpp_cli.base.console import say
    from asyncpp_cli.slurm.run_status import SlurmQueue
    from asyncpp_cli.tune.standing import standings

    tried: set[tuple[str, int]] = set()
    while True:
        arms = standings(experiment, plan, scheduler=SlurmQueue(experiment))
        due = {run: step for each in arms for run, step in each.due.items()}
        left = {run: step for run, step in due.items() if (run, step) not in tried}
        if not left:
            return 0 if not due else 1
        counts = sorted(Counter(left.values()).items())
        say(f"Training {', '.join(f'{count} to step {step}' for step, count in counts)}")
        code = launch_locally(experiment, replace(options, only=left, pauses=left))
        if code == INTERRUPTED_CODE:
            return code
        tried |= left.items()
