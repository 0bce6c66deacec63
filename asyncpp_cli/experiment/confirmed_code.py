"""Code that a template names is imported only if its user has named it, too.

Whoever writes a template does not choose what runs on the machine of the one who uses it. Confirmed is what
the command line names, in a setting or in `--allow-code`, and what the experiment's folder records.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from asyncpp_cli.base.console import say
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.runs.experiment_folder import open_experiment
from stages.config.limits import ConfigError
from stages.config.own_code import file_of_module, named_code
from stages.config.run_config import RunConfig


@dataclass(frozen=True)
class Confirmed:
    """The code that a user has confirmed."""

    modules: frozenset[str] = frozenset()
    """Modules, with all in them, or `module:name`."""
    typed: frozenset[str] = frozenset()
    """`module:name`, typed in a setting of the same command line."""


NOTHING = Confirmed()


def confirmed(
    allow_code: Iterable[str] | str, changes: Iterable[str], *, out: Path | None = None
) -> Confirmed:
    """What is confirmed by the options and settings of a command line, and by the experiment in `out`."""
    options = [allow_code] if isinstance(allow_code, str) else allow_code
    names = [name.strip() for option in options for name in option.split(",")]
    typed = re.findall(r"[^\W\d][\w.]*:\w+", " ".join(changes))
    recorded: tuple[str, ...] = ()
    if out is not None:
        with contextlib.suppress(UserError):  # it is new, or refused when it is written
            recorded = open_experiment(out).allowed_code
    return Confirmed(frozenset([*names, *recorded]), frozenset(typed))


def check_confirmed(configs: Iterable[RunConfig], by_user: Confirmed, *, source: str) -> None:
    """Check that the user has confirmed all code that configurations name, and list it. Imports none of it.

    Raises:
        UserError: some is not confirmed, or is of Python's own library.
    """
    keys: dict[str, str] = {}
    try:
        for config in configs:
            keys |= {name: key for key, name in named_code(config).items() if not _is_harmless(key, name)}
    except ConfigError as error:
        raise UserError(f"{source}: {error}") from error
    # What is not found is not imported either, and refused with a better message.
    places = {name: file_of_module(name.partition(":")[0]) for name in keys}
    listed = {
        name: f"{keys[name]} {name} ({place})"
        for name, place in places.items()
        if place is not None and name not in by_user.typed
    }
    if unconfirmed := [name for name in listed if not _covers(by_user.modules, name)]:
        modules = dict.fromkeys(name.partition(":")[0] for name in unconfirmed)
        what = ", ".join(listed[name] for name in unconfirmed)
        raise UserError(
            f"{source} names code that would run on this machine: {what}; if you trust it, add --allow-code "
            f"{','.join(modules)}"
        )
    if listed:
        say(f"note: {source} runs code of your own: {', '.join(listed.values())}")


def _covers(modules: frozenset[str], name: str) -> bool:
    module = name.partition(":")[0]
    parts = module.split(".")
    return name in modules or any(".".join(parts[:end]) in modules for end in range(1, len(parts) + 1))


def _is_harmless(key: str, name: str) -> bool:
    """Whether code is one of torch's optimizers."""
    return key == "optimizer.name" and name.partition(":")[0] == "torch.optim"
