"""Generates docs/performance.md, the budget of a block's time on an H100:

python docs/make_performance.py

Times that `benchmarks/big_stage.py --parts --out benchmarks/results` has written replace reckoned ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncpp_cli.planner.base_config import base_of
from asyncpp_cli.planner.budget import HEAD, UPDATE, Line, budget, utilisation
from asyncpp_cli.planner.devices import find_device
from asyncpp_cli.planner.roofline import ATTENTION_SHARE, MATRIX_SHARE, Roofline
from stages.config import RunConfig

FILE = Path(__file__).with_name("performance.md")
MEASURED = FILE.parents[1] / "benchmarks" / "results"
DEVICE = "h100"
MODELS = {"1b": 8, "7b": 2}
"""Sequences of a micro-batch of each model: 8,192 tokens."""
SETTINGS = ("optimizer=muon", "schedule.microbatches=16")

HEAD_OF_PAGE = f"""\
# Where a block's time goes

What one micro-batch costs in one block on an H100, part by part, and the share of the peak (MFU) that
follows. **Reckoned** times are the planner's (`asyncpp_cli/planner/roofline.py`): matrix products at
{MATRIX_SHARE:.0%} of the peak, attention at {ATTENTION_SHARE:.0%}, the rest at the memory's bandwidth.
**Measured** ones come from a GPU: on a machine with an H100,

    python benchmarks/big_stage.py --parts --model 7b --microbatch-size 2 --out benchmarks/results
    make docs

measures the same parts and puts them into this page, which `make docs` generates. Where every line says
reckoned, no GPU has measured it yet.

Not counted: waiting for other stages (the bubble) and for messages. The optimizer step is Muon's on one data
rank, divided by the micro-batches of a step (16). `adding weight gradients` is one pass over a block's
float32 gradients per micro-batch; `asyncpp plan` leaves it out. MFU counts no operation twice, and attention
as if it were not causal, as is usual; the operations of attention in the table are causal.
"""


def text() -> str:
    """The page."""
    return "\n".join([HEAD_OF_PAGE, *(_section(model, size) for model, size in MODELS.items())])


def config_of(model: str, *, microbatch_size: int) -> RunConfig:
    """The run of a section."""
    return base_of(model, [*SETTINGS, f"train.microbatch_size={microbatch_size}"]).config


def _section(model: str, size: int) -> str:
    config, roofline = config_of(model, microbatch_size=size), Roofline(find_device(DEVICE, key="device"))
    lines, measured = budget(config, roofline), _measured(model)
    heading = (
        f"## {model}: {size} x {config.data.context:,} tokens, width {config.model.width}, "
        f"MLP {config.model.mlp_width}, {config.train.precision}\n\n"
    )
    table = [
        "| part | GFLOP | GB moved | forward ms | backward ms | | what is fused |",
        "|---|---|---|---|---|---|---|",
        *(_row(line, measured.get(line.part)) for line in lines),
    ]
    shares = [
        "| `train.recompute` | MFU of a block | MFU of all blocks with embedding, head and optimizer | |",
        "|---|---|---|---|",
    ]
    for recompute in ("none", "selective", "full"):
        block, whole = utilisation(config, roofline, recompute=recompute)
        shares.append(f"| `{recompute}` | {block:.1%} | {whole:.1%} | reckoned |")
    return heading + "\n".join([*table, "", *shares]) + "\n"


def _row(line: Line, measured: dict[str, float] | None) -> str:
    forward, backward = line.forward, line.backward
    if measured is not None:
        forward, backward = measured["forward"], measured["backward"]
    part = f"{line.part} (whole model)" if line.part == HEAD else line.part
    part = f"{part}, its share" if line.part == UPDATE else part
    cells = [part, "" if line.flops is None else f"{line.flops / 1e9:,.0f}"]
    cells += ["" if line.moved is None else f"{line.moved / 1e9:.2f}"]
    cells += [f"{1e3 * forward:.2f}", f"{1e3 * backward:.2f}", "reckoned" if measured is None else "measured"]
    return "| " + " | ".join([*cells, line.fused]) + " |"


def _measured(model: str) -> dict[str, dict[str, float]]:
    """Seconds by part, if a GPU has measured them."""
    file = MEASURED / f"parts-{DEVICE}-{model}.json"
    if not file.exists():
        return {}
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    parts: dict[str, dict[str, float]] = content["parts"]
    return parts


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
