"""What a job of `asyncpp doctor --job` runs on a node: it writes down what it finds there.

Copied into a folder that the node is to see, and run there by itself; it imports nothing of ours.

    python on_node.py
"""

import json
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any


def main() -> None:
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "address": _address(),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "python": sys.version.split()[0],
        "versions": {package: _version(package) for package in ("torch", "submitit", "omegaconf")},
        "gpus": _gpus(),
        "time": time.time(),
    }
    Path("answer.writing").write_text(json.dumps(found))
    Path("answer.writing").replace("answer.json")


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
