"""How long `asyncpp plan` takes, processor time and wall, beside an older commit of asyncpp.

    git worktree add ../before 6a1d8e3
    python benchmarks/planning.py --before ../before --models 7b,10b --gpus 16,64

Each plan is a process of its own, with an empty cache folder; the two trees plan in turns. The figure is the
median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from frame import conditions, in_turns, parser, publish

HERE = Path(__file__).resolve().parent.parent


class Took(NamedTuple):
    """Seconds of a process and of the processes that it started."""

    wall: float
    processor: float


def planned(tree: Path, model: str, gpus: int, words: list[str]) -> Took:
    """Plan once, with the code in a folder."""
    command = [sys.executable, "-m", "asyncpp_cli", "plan", model, "--gpus", str(gpus), *words]
    with TemporaryDirectory() as cache:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(tree), "ASYNCPP_CACHE": cache},
            stdout=subprocess.DEVNULL,
            cwd=tree,
        )
        _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)}: failed in {tree}")
    return Took(time.perf_counter() - started, used.ru_utime + used.ru_stime)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--before", type=Path, help="checkout of an older commit")
    options.add_argument("--models", default="7b,10b")
    options.add_argument("--gpus", default="16,64")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--words", default="", help="further words of the command, such as --json or --map")
    given = options.parse_args()
    trees = {"now": HERE} | ({"before": given.before.resolve()} if given.before else {})
    rows = list(_rows(given, trees))
    publish("planning", "How long asyncpp plan takes", rows, conditions(given), given)


def _rows(given: argparse.Namespace, trees: dict[str, Path]) -> Iterator[dict[str, object]]:
    words = given.words.split()
    for model in given.models.split(","):
        for gpus in map(int, given.gpus.split(",")):
            arms = {name: partial(planned, tree, model, gpus, words) for name, tree in trees.items()}
            took = in_turns(arms, rounds=given.rounds)
            row: dict[str, object] = {"model": model, "gpus": gpus}
            for name, times in took.items():
                row |= {
                    f"{name}, wall s": statistics.median(each.wall for each in times),
                    f"{name}, processor s": statistics.median(each.processor for each in times),
                }
            if given.before:
                row["now / before"] = statistics.median(
                    here.processor / before.processor
                    for here, before in zip(took["now"], took["before"], strict=True)
                )
            yield row


if __name__ == "__main__":
    main()
