"""What a shell completes: experiments, runs, templates, sites and configuration keys.

Each function gets the context of the command line so far and the word begun; what cannot be read completes to
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

SCRIPTS = {
    "bash": """\
_asyncpp_completion() {
    local IFS=$'\\n'
    COMPREPLY=( $( env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \\
        _ASYNCPP_COMPLETE=complete_bash asyncpp ) )
    [[ ${COMPREPLY[0]} == */ || ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    return 0
}
complete -o default -F _asyncpp_completion asyncpp
""",
    "zsh": """\
#compdef asyncpp
_asyncpp_completion() {
    eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _ASYNCPP_COMPLETE=complete_zsh asyncpp)
}
compdef _asyncpp_completion asyncpp
""",
}
"""The functions that a shell calls, by shell; the protocol is Typer's."""


def experiments(incomplete: str) -> list[str]:
    """Folders of experiments; where there are none, all folders, to go on from."""
    folders = _folders(incomplete)
    found = [folder for folder in folders if Path(folder, "experiment.json").is_file()]
    return found or [f"{folder}/" for folder in folders]


def runs_of_folder(ctx: Any, incomplete: str) -> list[str]:
    """Ids of the runs of the experiment that the argument `folder` names, without those already named."""
    folder = ctx.params.get("folder")
    named = ctx.params.get("runs") or ()
    ids = [] if folder is None else _ids(Path(folder))
    return [name for name in _beginning(ids, incomplete) if name not in named]


def run_folders(incomplete: str) -> list[str]:
    """Runs, DIR/ID; before the id, experiments."""
    folder, _, begun = incomplete.rpartition("/")
    if folder and (ids := _ids(Path(folder))):
        return [f"{folder}/{name}" for name in _beginning(ids, begun)]
    return [f"{name}/" if not name.endswith("/") else name for name in experiments(incomplete)]


def templates(incomplete: str) -> list[str]:
    """Names of shipped experiments."""
    from asyncpp_cli.experiment.shipped import template_names

    return _beginning(template_names("experiments"), incomplete)


def templates_and_experiments(incomplete: str) -> list[str]:
    """Names of shipped experiments, and folders of experiments."""
    return [*templates(incomplete), *experiments(incomplete)]


def models_and_templates(incomplete: str) -> list[str]:
    """Names of shipped models and experiments."""
    from asyncpp_cli.experiment.shipped import template_names

    return _beginning([*template_names("models"), *template_names("experiments")], incomplete)


def sites(incomplete: str) -> list[str]:
    """Names of site profiles, shipped and the user's."""
    from asyncpp_cli.sites.profile import site_files

    return _beginning(sorted(site_files()), incomplete)


def settings(incomplete: str) -> list[str]:
    """Configuration keys, each with the equals sign that a value follows; also below `matrix.`."""
    from asyncpp_cli.runs.settings import KEYS

    prefix = "matrix." if incomplete.startswith("matrix.") else ""
    return _beginning([f"{prefix}{key}=" for key in KEYS], incomplete)


def _folders(incomplete: str) -> list[str]:
    """Folders whose path begins with the word, without hidden ones."""
    parent, _, begun = incomplete.rpartition("/")
    base = f"{parent}/" if "/" in incomplete else ""
    try:
        entries = sorted(entry.name for entry in Path(base).iterdir() if entry.is_dir())
    except OSError:
        return []
    return [
        f"{base}{name}"
        for name in entries
        if name.startswith(begun) and (begun.startswith(".") or not name.startswith("."))
    ]


def _ids(folder: Path) -> list[str]:
    from asyncpp_cli.base.errors import UserError
    from asyncpp_cli.runs.experiment_folder import open_experiment

    try:
        return [cell.id for cell in open_experiment(folder).cells]
    except (UserError, OSError):
        return []


def _beginning(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
