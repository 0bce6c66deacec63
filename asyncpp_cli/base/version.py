"""The version of asyncpp, and its commit if known.

Also loaded by setup.py by its path, so module-level imports are from the standard library only.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

RELEASE = "0.1.0"
"""The latest or the next release."""

STAMP_FILE = "build_stamp.json"
"""Holds the `Stamp` in packages built from a checkout; never in a checkout itself."""


@dataclass(frozen=True)
class Stamp:
    """Commit of the code that was built or runs."""

    commit: str | None
    """Ends in `-dirty` if tracked files were changed; None if unknown."""
    released: bool = False
    """Whether this commit is the release."""

    @property
    def version(self) -> str:
        """The release, with the commit as a local label (PEP 440) unless this is the release itself."""
        if self.commit is None or self.released:
            return RELEASE
        return f"{RELEASE}+g{self.commit.replace('-', '.')}"


def asyncpp_version() -> str:
    """The version of the code that runs: 0.1.0, 0.1.0+g<commit> or 0.1.0+g<commit>.dirty."""
    return running_stamp().version


def commit() -> str | None:
    """The git commit of the code that runs, with `-dirty` if it was changed; None if unknown.

    Known in a checkout, in an editable installation, and in packages built from a checkout.
    """
    return running_stamp().commit


@functools.cache
def running_stamp() -> Stamp:
    """The stamp of the code that runs."""
    return stamp_of(Path(__file__).resolve().parents[2])


def stamp_of(root: Path) -> Stamp:
    """The stamp of the code in a folder: a checkout, or a package built from one."""
    if (root / ".git").exists():
        checkout = checkout_of(root)
        if checkout is None:
            return Stamp(None)
        return Stamp(checkout.commit, released=_is_release(checkout))
    try:
        content = json.loads((root / "asyncpp_cli" / STAMP_FILE).read_text(encoding="utf-8"))
        commit, released = content["commit"], content["released"]
    except (OSError, ValueError, KeyError, TypeError):
        return Stamp(None)
    known = isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", commit) is not None
    return Stamp(commit if known else None, released=known and released is True)


def write_stamp(stamp: Stamp, root: Path) -> None:
    """Write the stamp into a copy of the packages outside a checkout."""
    content = {"commit": stamp.commit, "released": stamp.released}
    (root / "asyncpp_cli" / STAMP_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Checkout:
    """A git checkout, and what git says of it.

    The settings of a repository may name programs that git runs (`core.fsmonitor`, filters and others). Only
    `git rev-parse` reads them here, which runs none and refuses a repository of another user. Files are
    compared without settings, in a temporary repository that has the objects and the index of this one.
    """

    root: Path
    """The top folder, without links."""
    head: str
    """The commit: 12 digits or more."""
    index: Path
    objects: Path
    object_format: str
    changed: tuple[str, ...] | None = None
    """Tracked files whose content differs from the commit, relative to `root`; None if git fails."""

    @property
    def commit(self) -> str | None:
        """The commit, with `-dirty` if tracked files were changed; None if git fails."""
        if self.changed is None:
            return None
        return f"{self.head}-dirty" if self.changed else self.head

    def diff(self, names: Sequence[str]) -> str | None:
        """The changes of files against the commit; None if git fails."""
        found = self._compare("--text", "--", *names)
        return None if found is None else found.decode(errors="replace").strip()

    def compared(self) -> Checkout:
        """This checkout with `changed`, by git."""
        names = self._compare("--name-only", "-z")
        return self if names is None else replace(self, changed=tuple(os.fsdecode(names).split("\0")[:-1]))

    def _compare(self, *arguments: str) -> bytes | None:
        # A submodule has settings of its own.
        options = ("--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--ignore-submodules=all")
        try:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "refs").mkdir()
                (Path(folder) / "HEAD").write_text("ref: refs/heads/main\n")
                (Path(folder) / "config").write_text(
                    # A change of the mode alone is none: some filesystems keep no modes.
                    "[core]\nrepositoryFormatVersion = 1\nfileMode = false\n"
                    f"[extensions]\nobjectFormat = {self.object_format}\n"
                )
                for shared in self.index.parent.glob("sharedindex.*"):
                    (Path(folder) / shared.name).symlink_to(shared)
                environment = {
                    **dict.fromkeys(("GIT_DIR", "HOME", "XDG_CONFIG_HOME"), folder),
                    "GIT_WORK_TREE": str(self.root),
                    "GIT_INDEX_FILE": str(self.index),
                    "GIT_OBJECT_DIRECTORY": str(self.objects),
                    **dict.fromkeys(("GIT_CONFIG_NOSYSTEM", "GIT_ATTR_NOSYSTEM"), "1"),
                    "GIT_LITERAL_PATHSPECS": "1",
                }
                return _git(self.root, "diff", *options, self.head, *arguments, environment=environment)
        except OSError:
            return None


def checkout_of(folder: Path) -> Checkout | None:
    """The git checkout that holds a folder; None if there is none, it is another user's, or git fails."""
    facts = ("--show-toplevel", "--git-path", "index", "--git-path", "objects", "--show-object-format")
    # The user's own settings say which repositories of others are safe.
    own = {name: value for name, value in os.environ.items() if name.startswith("GIT_CONFIG_")}
    answer = _git(folder, "rev-parse", *facts, "--short=12", "HEAD", environment=own)
    lines = os.fsdecode(answer or b"").splitlines()
    if len(lines) != 5:
        return None
    root, index, objects, object_format, head = lines
    if object_format != "sha256":
        object_format = "sha1"  # an older git repeats the option
    # Paths that are not absolute are relative to the folder.
    index_file, object_folder = (Path(os.path.realpath(folder / each)) for each in (index, objects))
    return Checkout(Path(root), head, index_file, object_folder, object_format).compared()


def _is_release(checkout: Checkout) -> bool:
    tag = f"refs/tags/v{RELEASE}^{{commit}}"
    tagged = _git(checkout.root, "rev-parse", "--short=12", "--verify", "-q", tag, environment={})
    return not checkout.changed and os.fsdecode(tagged or b"").strip() == checkout.head


def _git(folder: Path, *arguments: str, environment: Mapping[str, str]) -> bytes | None:
    """What git prints; None if it fails. Of variables GIT_* it sees only those given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # Nothing is written, and what a partial clone lacks is not fetched, since that may run a command.
    kept |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=10,
            check=True,
            env=kept | dict(environment),
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout
