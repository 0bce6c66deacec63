"""Code of the user's own: imported only if its user has named it, and kept beside the runs that use it.

Whoever writes a template does not choose what runs on the machine of the one who uses it. Confirmed is what
the command line names, in a setting or in `--allow-code`, and what the experiment's folder records.

RUN/code/<module>.py       the files, as their packages hold them
RUN/code/repository.json   commit (ends in -dirty if tracked files differ), whether the diff is whole, and the
                           names and hashes of tracked files that differ and are not copied
RUN/code/changes.diff      the changes of the copied files against that commit, if there are any
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from traceback import format_list

from asyncpp_cli.base.atomic_files import write_json, write_text
from asyncpp_cli.base.console import say
from asyncpp_cli.base.errors import UserError, refusal_of
from asyncpp_cli.base.version import Checkout, checkout_of
from asyncpp_cli.runs.experiment_folder import open_experiment
from asyncpp_cli.runs.run_folder import Run
from stages.config.limits import ConfigError
from stages.config.own_code import file_of_module, named_code, own_code, raised_in
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
            named = named_code(config)
            if named.get("optimizer.name", "").partition(":")[0] == "torch.optim":
                del named["optimizer.name"]  # harmless
            keys |= {name: key for key, name in named.items()}
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


_LONGEST_DIFF = 1 << 20
"""Characters of a diff that are kept."""


@dataclass(frozen=True)
class CodeCopies:
    """Writes the copies of several runs, and asks git once for each place."""

    _checkouts: dict[Path, Checkout | None] = field(default_factory=dict)
    _hashes: dict[Path, str | None] = field(default_factory=dict)

    def write(self, run: Run, config: RunConfig) -> None:
        """Write the copy of a run's own code; nothing without any.

        Raises:
            OSError: a file cannot be read or written.
        """
        files = {module: file for found in own_code(config).values() for module, file in found.items()}
        for module, file in files.items():
            end = f"/{file.name}" if file.stem == "__init__" else f".{file.name.partition('.')[2]}"
            copy = run.code / (module.replace(".", "/") + end)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
        if not files:
            return
        place = next(iter(files.values())).parent
        if place not in self._checkouts:
            self._checkouts[place] = checkout_of(place)
        checkout = self._checkouts[place]
        if checkout is None or checkout.changed is None:
            return
        copied = {os.path.relpath(os.path.realpath(file), checkout.root) for file in files.values()}
        changes = (
            (checkout.diff(names) or "") if (names := sorted(copied.intersection(checkout.changed))) else ""
        )
        content = {
            "commit": checkout.commit,
            "diff_is_whole": len(changes) <= _LONGEST_DIFF,
            # Not their content: the folder is often shared, and they may hold secrets.
            "other_changes": {
                name: self._sha256(checkout.root / name) for name in checkout.changed if name not in copied
            },
        }
        write_json(run.code / "repository.json", content)
        if changes:
            write_text(run.code / "changes.diff", f"{changes[:_LONGEST_DIFF]}\n")

    def _sha256(self, file: Path) -> str | None:
        """The hash of a file; None if it was removed, is none or cannot be read."""
        if file not in self._hashes:
            self._hashes[file] = None
            with contextlib.suppress(OSError):
                if stat.S_ISREG(file.lstat().st_mode):
                    with file.open("rb") as opened:
                        self._hashes[file] = hashlib.file_digest(opened, "sha256").hexdigest()
        return self._hashes[file]


def mistake_in_own_code(error: Exception, config: RunConfig) -> UserError | None:
    """What to say of an error in training if a run's own code is its cause; None if it is not, or if it is an
    error of the system. The frames of own code, and of what it called, are printed: the log has them."""
    from optimizers.custom import OptimizerError
    from schedules import ScheduleError
    from stages.model.custom import FactoryError

    frames, place = raised_in(error, config)
    known = isinstance(error, FactoryError | OptimizerError | ScheduleError)
    if (not known and not frames) or refusal_of(error) or "OutOfMemory" in type(error).__name__:
        return None
    if frames:
        print("".join(["In the run's own code:\n", *format_list(frames)]), end="", file=sys.stderr)
    message = str(error) if known else f"the run's own code fails ({type(error).__name__}: {error})"
    return UserError(f"{message}{place}")
