"""Containers for the ranks of a job (`container` of a site profile), which srun starts.

Only the ranks run in the container: the job itself needs SLURM's commands. They find in it, at the same paths
as outside, the experiment's folder (with the code of the submission), and the run's data and initial weights.

pyxis (NVIDIA/pyxis, "Usage") adds flags to srun; apptainer (its user guide, "Bind Paths and Mounts") is the
program that srun starts. Both share the node's network and its process ids, on which the ranks rely.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from stages.config.records import Meta
from stages.config.run_config import RunConfig, trained_paths

_REFERENCE = {
    "apptainer": re.compile(r"(docker|oras|library)://[A-Za-z0-9][A-Za-z0-9._:/@+-]*"),
    "pyxis": re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@#+-]*"),
}
_ACCEPTED_IMAGE = {
    "apptainer": "an absolute path of a .sif file or a folder, or docker://NAME:TAG",
    "pyxis": "an absolute path of a .sqsh file, or NAME:TAG as enroot writes it",
}
_PYTHON = Meta(
    pattern=r"\A[A-Za-z0-9/][^\x00-\x20\x7f=]*\Z",
    description="a name such as python3, or a path in the image",
)
_UNMOUNTABLE = re.compile(r'[:,"\\\x00-\x1f\x7f]')
"""What neither runtime takes in the path of a mount."""
_PASSED_ON = (
    "PYTHONPATH",
    "PYTHONSAFEPATH",
    "PYTHONDONTWRITEBYTECODE",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)
"""Variables of the job that replace the image's own."""


class ContainerError(ValueError):
    """A container that is not accepted.

    Attributes:
        key: key below `container`; empty for all of it.
        message: what is wrong, and what is accepted.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.key = key
        self.message = message


@dataclass(frozen=True, kw_only=True)
class Container:
    """Image and mounts of the ranks' container."""

    runtime: Literal["apptainer", "pyxis"]
    """What starts the ranks in the image: `apptainer` or `pyxis`."""
    image: str
    """Absolute path of an image, or its name in a registry."""
    python: Annotated[str, _PYTHON] = "python3"
    """Python interpreter in the image, 3.11 to 3.13."""
    mounts: list[str] = field(default_factory=list)
    """Further folders: SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro."""


def check_container(container: Container) -> None:
    """Check the image and the mounts.

    Raises:
        ContainerError: one is not accepted.
    """
    image = container.image
    is_path = image.startswith("/") and not re.search(r"[\x00-\x1f\x7f]", image)
    if not is_path and not _REFERENCE[container.runtime].fullmatch(image):
        raise ContainerError("image", f"{image!r}; accepted: {_ACCEPTED_IMAGE[container.runtime]}")
    for mount in container.mounts:
        _parsed(mount)


def _parsed(mount: str) -> tuple[str, str, str]:
    """Source, target and mode of a mount."""
    source, *rest = mount.split(":")
    target, mode = [*rest, *[source, "rw"][len(rest) :]] if len(rest) <= 2 else ("", "")
    if mode not in ("ro", "rw") or not all(_is_mountable(path) for path in (source, target)):
        accepted = 'SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro with absolute paths without , : " and \\'
        raise ContainerError("mounts", f"{mount!r}; accepted: {accepted}")
    return source, target, mode


def _is_mountable(path: str) -> bool:
    return path.startswith("/") and not _UNMOUNTABLE.search(path)


def image_state(container: Container) -> str:
    """Size and modification time of the image's file; empty if there is no such file here."""
    try:
        status = Path(container.image).stat()
    except OSError:
        return ""
    return f"{status.st_size} bytes of {status.st_mtime_ns}" if container.image.startswith("/") else ""


def mounts_of(container: Container, experiment: Path, config: RunConfig) -> list[str]:
    """What is mounted for a run, as SOURCE:TARGET:MODE: the profile's mounts, then what is not in them.

    Args:
        container: the container.
        experiment: the experiment's folder.
        config: the run's configuration, with the present path of its data.

    Raises:
        ContainerError: a path of the run cannot be mounted.
    """
    paths = (*trained_paths(config.data).values(), *config.data.validation.values(), config.model.init)
    read = [_folder_of(path) for path in paths if path is not None]
    return mounts_with(container, [(experiment, "rw"), *((path, "ro") for path in read)])


def mounts_with(container: Container, wanted: Sequence[tuple[Path, str]]) -> list[str]:
    """The profile's mounts, then what is not in them, as SOURCE:TARGET:MODE.

    Args:
        container: the container.
        wanted: paths and their modes, `rw` or `ro`.

    Raises:
        ContainerError: a path cannot be mounted.
    """
    mounts = [_parsed(mount) for mount in container.mounts]
    for path, mode in wanted:
        if not _is_mountable(str(path)):
            raise ContainerError("mounts", f'{str(path)!r} cannot be mounted: its path has one of , : " \\')
        if not any(_covers(mount, path, mode) for mount in mounts):
            mounts.append((str(path), str(path), mode))
    return [":".join(mount) for mount in mounts]


def _folder_of(path: str) -> Path:
    """The folder to mount for a path of data: files beside it belong to it."""
    absolute = Path(path).absolute()
    return absolute.parent if absolute.is_file() else absolute


def _covers(mount: tuple[str, str, str], path: Path, mode: str) -> bool:
    source, target, mounted = mount
    return source == target and path.is_relative_to(source) and (mode == "ro" or mounted == "rw")


def container_words(
    container: Container,
    mounts: Sequence[str],
    *,
    work_folder: Path,
    gpus: bool,
    environment: Mapping[str, str],
) -> tuple[list[str], list[str]]:
    """Flags of srun, and the words that start Python in the container.

    Args:
        container: the container.
        mounts: see `mounts_with`.
        work_folder: working folder of the ranks.
        gpus: whether the job has GPUs.
        environment: variables of the ranks. Those of Python and of the network replace the image's own.
    """
    # Both runtimes prefer the image's variables. Packages in the home folder are for the host's Python.
    kept = [f"{name}={environment[name]}" for name in _PASSED_ON if name in environment]
    python = ["env", "-u", "PYTHONHOME", *kept, "PYTHONNOUSERSITE=1", container.python]
    if container.runtime == "pyxis":
        flags = [
            f"--container-image={container.image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={work_folder}",
            "--no-container-entrypoint",
            "--no-container-remap-root",
        ]
        return flags, python
    nv = ["--nv"] if gpus else []
    binds = [word for mount in mounts for word in ("--bind", mount)]
    return [], ["apptainer", "exec", *nv, "--pwd", str(work_folder), *binds, container.image, *python]
