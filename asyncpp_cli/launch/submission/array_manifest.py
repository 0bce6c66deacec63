"""The manifest of a job array, read by its tasks when they start: runs, options, code and versions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncpp_cli.atomic_files import read_json, write_json
from asyncpp_cli.launch.containers import Container
from asyncpp_cli.launch.submission.job_shape import JobShape
from asyncpp_cli.runs.run_folder import FORMAT


@dataclass(frozen=True, kw_only=True)
class ManifestRow:
    """A run of an array."""

    id: str
    config_sha256: str
    steps: int
    until: int | None = None
    """Step after which it pauses; None: it trains to the end."""


@dataclass(frozen=True, kw_only=True)
class ArrayManifest:
    """Content of array-K.json."""

    name: str
    """Job name."""
    submission: str
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
    write_json(file, {"format": FORMAT} | asdict(manifest))


def read_manifest(file: Path) -> ArrayManifest:
    """The table in a file.

    Raises:
        DamagedError: it is none.
    """
    content = read_json(file, newest_format=FORMAT)
    content.pop("format")
    shape = JobShape(**content.pop("shape"))
    rows = [ManifestRow(**row) for row in content.pop("rows")]
    container = content.pop("container", None)
    return ArrayManifest(shape=shape, rows=rows, container=container and Container(**container), **content)
