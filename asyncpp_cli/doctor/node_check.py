"""Script that `asyncpp doctor --job` runs on each node; it writes what it finds to JSON files.

It is copied into a shared folder, with a snapshot of asyncpp in its `code`. It imports only the
standard library, so that it can report what is missing.

    srun python node_check.py
"""

import json
import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_TIMEOUT = 100.0
"""Timeout of the handshake: enough to load torch and for both exchanges to time out by themselves."""


def main() -> None:
    os.chdir(Path(__file__).absolute().parent)
    rank, size = int(os.environ.get("SLURM_PROCID", "0")), int(os.environ.get("SLURM_NTASKS", "1"))
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "versions": {package: _version(package) for package in ("torch", "msgspec")},
        "gpus": _gpus(),
    }
    _write(f"answer-{rank}", found)
    if size > 1:
        _write(f"handshake-{rank}", _handshake(rank))


def _write(name: str, content: dict[str, Any]) -> None:
    Path(f"{name}.writing").write_text(json.dumps(content))
    Path(f"{name}.writing").replace(f"{name}.json")


def _handshake(rank: int) -> dict[str, Any]:
    """Result of `stages.comm.handshake` on this rank; `problem` if it could not run."""
    here = Path.cwd()
    (code,) = (here / "code").iterdir()
    path = os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-P", "-m", "stages.comm.handshake", str(rank), str(here / "met"), "apart"]
    try:
        ended = subprocess.run(
            command,
            env=dict(os.environ) | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"it did not end within {_TIMEOUT:g} s"}
    if ended.returncode != 0:
        return {"problem": (ended.stderr.strip().splitlines() or ["it printed nothing"])[-1][:300]}
    return json.loads(ended.stdout or "{}")  # type: ignore[no-any-return]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


if __name__ == "__main__":
    main()
