"""Seconds of the parts that `asyncpp_cli.planner.budget` reckons.

They are measured one at a time and not compiled; the block as a whole is compiled where runs are.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from frame import seconds_of, today
from torch import Tensor

from asyncpp_cli.planner.budget import ADDING, ATTENTION, BLOCK, HEAD, NORMS, ROTARY, SWIGLU, UPDATE, budget
from asyncpp_cli.planner.devices import DEVICES
from asyncpp_cli.planner.roofline import Roofline
from stages.config import RunConfig
from stages.model.decoder import initialise, make_block, rotary_table
from stages.model.layers import Block, rotate
from stages.pipeline.build import dtypes
from stages.profile import measure

WARM_UP = 2
Seconds = dict[str, float]


def measured_parts(config: RunConfig, *, device: torch.device, repeats: int) -> dict[str, Seconds]:
    """Median seconds of each part's forward and backward, of a dense model; those of the planner's budget."""
    dtype, size = dtypes(config).replica, config.train.microbatch_size
    block = make_block(config.model, experts=False).to(device=device, dtype=dtype)
    assert isinstance(block, Block)
    for name, parameter in block.named_parameters():
        initialise(parameter, name=name, seed=0, model=config.model)
    attention, mlp, context = block.attention, block.mlp, config.data.context
    table = rotary_table(config.model, context=context).to(device, torch.promote_types(dtype, torch.float32))
    generator = torch.Generator(device).manual_seed(0)

    def values(*shape: int) -> Tensor:
        drawn = torch.randn(size, *shape, generator=generator, device=device, dtype=torch.float32)
        return drawn.to(dtype).requires_grad_()

    x, wide, other = (
        values(context, config.model.width),
        *(values(context, config.model.mlp_width) for _ in "ab"),
    )
    heads, kv_heads, width = config.model.heads, config.model.kv_heads, attention.head_dim
    query, key, value = (values(count, context, width) for count in (heads, kv_heads, kv_heads))
    mixed = values(context, heads * width)

    def passed(
        run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor, through: Sequence[str] = ()
    ) -> Seconds:
        weights = [p for name in through for p in block.get_submodule(name).parameters()]
        return _both(run, inputs, weights, device=device, repeats=repeats)

    projections = ("attention.query", "attention.key", "attention.value")
    parts = {
        NORMS: passed(
            lambda x: (block.attention_norm(x), block.mlp_norm(x)), x, through=("attention_norm", "mlp_norm")
        ),
        "queries, keys, values": passed(
            lambda x: (attention.query(x), attention.key(x), attention.value(x)), x, through=projections
        ),
        "output of attention": passed(lambda x: (attention.output(x),), mixed, through=("attention.output",)),
        "gate and up": passed(lambda x: (mlp.gate(x), mlp.up(x)), x, through=("mlp.gate", "mlp.up")),
        "down": passed(lambda x: (mlp.down(x),), wide, through=("mlp.down",)),
        ROTARY: passed(lambda q, k: (rotate(q, table), rotate(k, table)), query, key),
        ATTENTION: passed(
            lambda q, k, v: (
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads),
            ),
            query,
            key,
            value,
        ),
        SWIGLU: passed(lambda gate, up: (F.silu(gate) * up,), wide, other),
    }
    totals = [torch.zeros_like(p, dtype=dtypes(config).master) for p in block.parameters()]
    gradients = [parameter.detach().clone() for parameter in block.parameters()]

    def add() -> None:
        for total, gradient in zip(totals, gradients, strict=True):
            total.add_(gradient)

    parts[ADDING] = {"forward": 0.0, "backward": _median(add, device=device, repeats=repeats)}
    whole = measure(
        config, device=device, microbatch_sizes=[size], repeats=repeats, progress=lambda part: None
    )
    update = whole["block"]["update"] / config.schedule.microbatches
    parts[UPDATE] = {"forward": 0.0, "backward": update}
    for part, name in ((BLOCK, "block"), (HEAD, "head")):
        seconds = whole[name]["microbatch"][str(size)]
        parts[part] = {key: seconds[key] for key in ("forward", "backward")}
    return parts


def print_parts(config: RunConfig, *, device: torch.device, repeats: int, out: Path | None) -> None:
    """Print the parts, reckoned and measured.

    Args:
        config: of a dense model.
        device: measured.
        repeats: of each part.
        out: folder to write them into, for docs/performance.md; None: they are only printed.
    """
    measured = measured_parts(config, device=device, repeats=repeats)
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    known = next((name for name in DEVICES if name in chip.lower()), "h100")
    print(f"Forward + backward; reckoned for {known}, measured on {chip}, torch {torch.__version__}.\n")
    print("| part | reckoned ms | measured ms |\n|---|---|---|")
    for line in budget(config, Roofline(DEVICES[known])):
        times = [line.forward, line.backward, *measured[line.part].values()]
        first, second, third, fourth = (f"{1e3 * seconds:.3g}" for seconds in times)
        print(f"| {line.part} | {first} + {second} | {third} + {fourth} |")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        name = known if device.type == "cuda" else "cpu"
        file = out / f"parts-{name}-{config.model.name}.json"
        content = {"device": chip, "torch": torch.__version__, "date": today(), "parts": measured}
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {file}", file=sys.stderr)


def _both(
    run: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    device: torch.device,
    repeats: int,
) -> Seconds:
    outputs = run(*inputs)
    ones = [torch.ones_like(output) for output in outputs]
    return {
        "forward": _median(lambda: run(*inputs), device=device, repeats=repeats),
        "backward": _median(
            lambda: torch.autograd.grad(outputs, [*inputs, *weights], ones, retain_graph=True),
            device=device,
            repeats=repeats,
        ),
    }


def _median(work: Callable[[], object], *, device: torch.device, repeats: int) -> float:
    times = [seconds_of(work, device=device.type) for _ in range(WARM_UP + repeats)]
    return statistics.median(times[WARM_UP:])
