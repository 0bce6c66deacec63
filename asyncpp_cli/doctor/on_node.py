"""What a job of `asyncpp doctor --job` runs on each of its nodes: it writes down what it finds there.

Copied into a folder that the nodes are to see, with our code in `code` beside it, and run there by itself; it
imports nothing of ours, so that it can say what is missing.

    srun python on_node.py
"""

import json
import os
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_SECONDS = 100.0
"""For the handshake: to load torch, and for both of its exchanges to give up by themselves."""


def main() -> None:
    rank, size = int(os.environ.get("SLURM_PROCID", "0")), int(os.environ.get("SLURM_NTASKS", "1"))
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "address": _address(),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "python": sys.version.split()[0],
        "versions": {package: _version(package) for package in ("torch", "submitit", "omegaconf")},
        "gpus": _gpus(),
        "time": time.time(),
    }
    _write(f"answer-{rank}", found)
    if size > 1:
        _write(f"handshake-{rank}", _handshake(rank))


def _write(name: str, content: dict[str, Any]) -> None:
    Path(f"{name}.writing").write_text(json.dumps(content))
    Path(f"{name}.writing").replace(f"{name}.json")


def _handshake(rank: int) -> dict[str, Any]:
    """What this rank found of `stages.handshake`; `problem` if it did not come to that."""
    here = Path.cwd()
    (code,) = (here / "code").iterdir()
    path = os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-P", "-m", "stages.handshake", str(rank), str(here / "met"), "apart"]
    try:
        ended = subprocess.run(
            command,
            env=dict(os.environ) | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"it did not end within {_SECONDS:g} s"}
    if ended.returncode != 0:
        return {"problem": (ended.stderr.strip().splitlines() or ["it ended without a word"])[-1][:300]}
    return json.loads(ended.stdout or "{}")  # type: ignore[no-any-return]


def _address() -> str:
    """By which other nodes would reach this one, as far as its name tells."""
    try:
        return socket.gethostbyname(socket.getfqdn())
    except OSError:
        return ""


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
