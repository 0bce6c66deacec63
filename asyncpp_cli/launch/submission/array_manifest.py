"""The manifest of a job array, read by its tasks when they start: runs, options, code and versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncpp_cli.atomic_files import write_record
from asyncpp_cli.launch.containers import Container
from asyncpp_cli.launch.submission.job_shape import JobShape
from asyncpp_cli.runs.lineage import FolderName, RunId
from stages.records import Count, FileRecord, Record, read_record


class ManifestRow(Record, frozen=True, kw_only=True):
    """A run of an array."""

    id: RunId
    config_sha256: str
    steps: Count
    until: Count | None = None
    """Step after which it pauses; None: it trains to the end."""


class ArrayManifest(FileRecord, frozen=True, kw_only=True):
    """Content of array-K.json."""

    name: str
    """Job name."""
    submission: FolderName
    cluster: str
    replay: bool
    retries: int
    signal_lead: int
    network_interface: str | None
    srun_flags: list[str]
    site_settings: dict[str, Any]
    code: str
    """`snapshot.code_hash` of the code to run."""
    software: dict[str, str]
    shape: JobShape
    rows: list[ManifestRow]
    """Runs by array index."""
    exclude: str = ""
    """Nodes that the site's profile excludes."""
    container: Container | None = None
    """Container of the ranks."""
    image_state: str = ""
    """`containers.image_state` at submission."""


def write_manifest(file: Path, manifest: ArrayManifest) -> None:
    """Write array-K.json."""
    write_record(file, manifest)


def read_manifest(file: Path) -> ArrayManifest:
    """The manifest in a file.

    Raises:
        FileNotFoundError: there is none.
        DamagedError: it is damaged.
    """
    return read_record(file, ArrayManifest)
