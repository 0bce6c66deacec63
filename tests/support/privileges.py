"""Commands that run with fewer privileges than the test, or as other users."""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.command_line import Ended

NOBODY = "setpriv --ruid 54321 --bounding-set=-sys_resource,-sys_admin"


def permitted(command: str) -> bool:
    ended = subprocess.run(["/bin/sh", "-c", command], capture_output=True, check=False, timeout=60)
    return ended.returncode == 0


@dataclass(frozen=True)
class User:
    """Another user, who is in a group; needs root."""

    id: int
    group: int
    umask: int
    home: Path
    """In a folder that every user may enter; made when it is missing."""

    def permitted(self) -> bool:
        """Whether this machine lets the test act as this user."""
        return os.geteuid() == 0 and self.run("--version").code == 0

    def run(self, *arguments: str | Path) -> Ended:
        """Run `asyncpp` as this user."""
        self.home.mkdir(exist_ok=True)
        os.chown(self.home, self.id, self.id)
        identity = f"--reuid={self.id} --regid={self.id} --groups={self.group}"
        command = shlex.join([sys.executable, "-P", "-m", "asyncpp_cli", *map(str, arguments)])
        script = f"{self._with_python()} exec setpriv {identity} {command}"
        ended = subprocess.run(
            ["unshare", "-m", "--propagation", "private", "sh", "-c", script],
            capture_output=True,
            text=True,
            check=False,
            timeout=250,
            umask=self.umask,
            cwd=self.home,
            env=os.environ | {"HOME": str(self.home), "ASYNCPP_CACHE": f"{self.home}/cache"},
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def _with_python(self) -> str:
        """Shell commands that make this Python accessible although it lies in a home that is not."""
        prefix = Path(sys.base_prefix)
        closed = [folder for folder in prefix.parents if not folder.stat().st_mode & 0o001]
        if not closed:
            return ""
        opened = self.home / "opened"
        inside = opened / prefix.relative_to(closed[-1])
        inside.mkdir(parents=True, exist_ok=True, mode=0o755)
        mounts = (f"mount --bind {prefix} {inside}", f"mount --rbind {opened} {closed[-1]}")
        return " && ".join([*mounts, ""])
