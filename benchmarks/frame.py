"""What the benchmarks share: options, conditions, measuring in turns, and what becomes of the figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import yaml

from asyncpp_cli.base.version import commit

T = TypeVar("T")


def parser(document: str) -> argparse.ArgumentParser:
    """A parser whose help is a script's docstring, with the options that all have."""
    made = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="figures as JSON on standard output")
    made.add_argument("--out", type=Path, help="folder for a dated page of results")
    return made


def in_turns(arms: Mapping[str, Callable[[], T]], *, rounds: int) -> dict[str, list[T]]:
    """What each arm returns, by round.

    Who goes first alternates: a load that changes, and what one arm leaves in the caches, meet all alike.
    """
    results: dict[str, list[T]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in list(arms)[:: -1 if number % 2 else 1]:
            results[name].append(arms[name]())
    return results


def seconds_of(
    work: Callable[[], object], *, device: str = "cpu", clock: Callable[[], float] = time.perf_counter
) -> float:
    """Time that some work takes, on a GPU until the device has done it."""
    wait = _nothing
    if device.startswith("cuda"):
        import torch

        wait = torch.cuda.synchronize
    wait()
    started = clock()
    work()
    wait()
    return clock() - started


def _nothing() -> None:
    pass


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def processor() -> str:
    """Name of the CPU, and whether it multiplies bfloat16 in hardware."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    name = next((line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line), "CPU")
    return f"{name} ({'with' if 'avx512_bf16' in text or 'amx_bf16' in text else 'without'} bfloat16 units)"


def conditions(options: argparse.Namespace, **own: object) -> dict[str, Any]:
    """A script's options, what it adds, and the machine."""
    given = {name: value for name, value in vars(options).items() if name not in ("json", "out")}
    return {
        **given,
        **own,
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        "date": today(),
    }


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows of equal keys as Markdown; a single row stands upright."""
    if len(rows) == 1:
        head, cells = ["figure", "value"], [[name, _cell(value)] for name, value in rows[0].items()]
    else:
        head, cells = list(rows[0]), [[_cell(value) for value in row.values()] for row in rows]
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={_cell(of)}" for key, of in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_cell, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def publish(
    name: str,
    title: str,
    rows: Sequence[Mapping[str, object]],
    where: Mapping[str, object],
    options: argparse.Namespace,
    **known: object,
) -> None:
    """Print the figures with their conditions, and write the page that `--out` asks for.

    Args:
        name: of the page's file, without its date.
        title: its heading.
        rows: the figures, with equal keys.
        where: the conditions.
        options: of the script.
        known: conditions for the page's beginning, as in `write_dated`.
    """
    if options.json:
        print(json.dumps({"rows": rows, "conditions": where}, indent=1, default=str))
    else:
        print(table(rows), table([where]), sep="\n")
    if options.out:
        write_dated(options.out, name, f"# {title}\n\n{table(rows)}\n{table([where])}", **known)


def write_dated(folder: Path, name: str, text: str, **known: object) -> None:
    """Write `text` as `FOLDER/NAME-DATE.md`, and print that.

    The page begins with the conditions known here and those in `known`; benchmarks/results/README.md says how
    to add the rest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{today()}.md"
    front = {
        "date": today(),
        "hardware": f"{processor()}, {os.cpu_count()} cores",
        "versions": f"Python {platform.python_version()}, torch {version('torch')}",
        "commit": commit() or "",
        "command": shlex.join(["python", *sys.argv]),
        "seeds": "",
        "data": "this page",
        **known,
    }
    yaml_front = yaml.safe_dump(front, sort_keys=False, width=120)
    file.write_text(f"---\n{yaml_front}---\n\n{text}", encoding="utf-8")
    print(f"wrote {file}", file=sys.stderr)
