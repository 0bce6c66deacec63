"""`asyncpp profile`: measures the parts of a model on this machine."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

import typer

from asyncpp_cli.console import tell
from asyncpp_cli.errors import UserError
from stages.torch_process import importing_torch


def profile(
    what: Annotated[
        str,
        typer.Argument(metavar="MODEL|TEMPLATE", help="Template of a model or an experiment, or its file."),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="File to write, for `asyncpp plan --profile`.")
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes, as in optimizer=muon or data.context=4096."),
    ] = None,
    microbatch_sizes: Annotated[
        list[int] | None,
        typer.Option(
            "--microbatch-size", metavar="N", min=1, help="Sequences per micro-batch; can be repeated."
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", min=1, help="Measurements of each part.")
    ] = 20,
) -> None:
    """Measure what the parts of a model cost on this machine.

    Forward and backward of embedding, block and head, and their optimizer step.

    Uses the GPU if there is one, else `site.threads` CPU threads. `asyncpp plan --profile FILE` then uses
    these times instead of estimates.
    """
    from asyncpp_cli.atomic_files import write_json
    from asyncpp_cli.console import say
    from asyncpp_cli.planner.base_config import base_of
    from asyncpp_cli.planner.profile_costs import FORMAT, conditions
    from stages.compile_rule import compiles_here

    config = base_of(what, changes or []).config
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; give the name of a file")
    with importing_torch():
        import torch

        from stages.comm.process import choose_device
        from stages.profile import measure

    torch.set_num_threads(config.site.threads)
    device = choose_device(config.site)
    parts = measure(
        config,
        device=device,
        microbatch_sizes=microbatch_sizes or [config.train.microbatch_size],
        repeats=repeats,
        progress=lambda part: say(f"measuring {part}"),
    )
    content = {
        "format": FORMAT,
        "conditions": conditions(config) | {"compile": compiles_here(config, device=device.type)},
        "parts": parts,
        "message_seconds": 0.0,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": config.site.threads,
        "host": platform.node(),
        "torch": torch.__version__,
    }
    write_json(out, content)
    tell(f"{out}: a block takes {_milliseconds(parts, 'block')} on {content['device']}")


def _milliseconds(parts: dict[str, dict[str, dict[str, dict[str, float]]]], name: str) -> str:
    size, times = next(iter(parts[name]["microbatch"].items()))
    forward, backward = (f"{1e3 * times[key]:.3g}" for key in ("forward", "backward"))
    return f"{forward} + {backward} ms (forward + backward) with {size} sequences"
