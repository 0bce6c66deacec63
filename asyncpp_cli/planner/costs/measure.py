"""Measures the parts of a model on this machine, for `asyncpp plan` and `asyncpp sweep`."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncpp_cli.base.console import say
from asyncpp_cli.base.outputs import write_output
from asyncpp_cli.base.worker import exit_without
from asyncpp_cli.planner.costs.profile_costs import FORMAT, Measured, conditions
from asyncpp_cli.runs.config_file import read_config
from stages.config.records import with_checksum
from stages.config.run_config import RunConfig
from stages.config.torch_process import importing_torch, leave
from stages.model.compiler import compiles_here


def measure(config: RunConfig, file: Path, *, microbatch_sizes: Sequence[int], repeats: int) -> Measured:
    """Measure forward and backward of embedding, block and head, and their optimizer step; write the times.

    On the GPU if there is one, else on `site.threads` CPU threads.

    Args:
        config: the run's configuration.
        file: to write, for `asyncpp_cli.planner.costs.profile_costs.read_profile`.
        microbatch_sizes: sequences per micro-batch to measure with; empty: those of the configuration.
        repeats: measurements of each part.

    Returns:
        The times, as `read_profile` reads them from the file.
    """
    content = measured_here(
        config,
        microbatch_sizes=list(microbatch_sizes) or [config.train.microbatch_size],
        repeats=repeats,
        progress=lambda part: say(f"measuring {part}"),
    )
    write_output(file, with_checksum(json.dumps(content)))
    say(f"{file}: a block takes {_milliseconds(content['parts'], 'block')} on {content['device']}")
    return Measured(file, content)


def measured_here(
    config: RunConfig, *, microbatch_sizes: Sequence[int], repeats: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """The content of `Measured`: times on the GPU if there is one, else on `site.threads` CPU threads."""
    with importing_torch():
        import torch

        from stages.comm.process import choose_device
        from stages.profile import measure as measure_parts

    torch.set_num_threads(config.site.threads)
    device = choose_device(config.site)
    parts = measure_parts(
        config,
        device=device,
        microbatch_sizes=microbatch_sizes,
        repeats=repeats,
        progress=progress,
    )
    return {
        "format": FORMAT,
        "conditions": conditions(config) | {"compile": compiles_here(config, device=device.type)},
        "parts": parts,
        "message_seconds": 0.0,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": config.site.threads,
        "host": platform.node(),
        "torch": torch.__version__,
    }


def _milliseconds(parts: dict[str, dict[str, dict[str, dict[str, float]]]], name: str) -> str:
    size, times = next(iter(parts[name]["microbatch"].items()))
    forward, backward = (f"{1e3 * times[key]:.3g}" for key in ("forward", "backward"))
    return f"{forward} + {backward} ms (forward + backward) with {size} sequences"


_QUICK_REPEATS = 3


def main(parent: str, *files: str) -> None:
    """Print the quickly measured times of the configurations in these files, as a JSON list, for the process
    `parent`."""
    exit_without(int(parent))
    contents = []
    for config in (read_config(Path(file)) for file in files):
        sizes = [config.train.microbatch_size]
        contents.append(
            measured_here(config, microbatch_sizes=sizes, repeats=_QUICK_REPEATS, progress=lambda part: None)
        )
    print(json.dumps(contents))
    leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
