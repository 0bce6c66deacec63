"""A block of experts, grouped and in a loop, beside a dense block of the same active size: tokens per second.

    python benchmarks/experts.py --out benchmarks/results

Each block computes a forward and a backward of one micro-batch. The forms take turns on the same batch, and
the fastest round of each counts. Time is processor time on one thread, which other work on the machine
disturbs little.
"""

from __future__ import annotations

import argparse
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from dated import today, write_dated
from torch import Tensor, nn

from stages.config import ModelConfig
from stages.model.decoder import initialise, make_block, rotary_table
from stages.model.moe import grouped

FORMS = ("dense", "grouped", "loop")


@dataclass(frozen=True)
class Size:
    """A block and its micro-batch; the dense one has an MLP as wide as the active experts together."""

    name: str
    width: int
    heads: int
    experts: int
    active: int
    expert_width: int
    batch: int
    context: int


SIZES = (
    Size("nano-moe", 128, 4, 16, 4, 96, 8, 128),
    Size("2b-moe", 1024, 16, 64, 8, 512, 1, 512),
)


def block_of(size: Size, *, experts: bool) -> tuple[nn.Module, list[Tensor]]:
    """The block, and what it takes beside activations."""
    config = ModelConfig(
        name=size.name,
        layers=1,
        width=size.width,
        heads=size.heads,
        kv_heads=size.heads,
        mlp_width=size.active * size.expert_width,
        experts=size.experts if experts else 0,
        active_experts=size.active if experts else None,
        expert_width=size.expert_width if experts else None,
    )
    block = make_block(config, experts=experts)
    for name, parameter in block.named_parameters():
        initialise(parameter, name=f"blocks.0.{name}", seed=0, layers=1)
    rotation = rotary_table(config, context=size.context).float()
    return block, [rotation, torch.zeros(size.experts)] if experts else [rotation]


def measure(size: Size, *, rounds: int) -> dict[str, float]:
    """Tokens per second of each form."""
    blocks = {form: block_of(size, experts=form != "dense") for form in FORMS}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size.batch, size.context, size.width, generator=generator).requires_grad_()
    fastest = dict.fromkeys(FORMS, float("inf"))
    serves = grouped.is_grouped
    for turn in range(rounds + 1):
        for form, (block, tables) in blocks.items():
            grouped.is_grouped = serves if form == "grouped" else lambda *given: False
            started = time.process_time()
            out = block(x, *tables)
            (out[0] if form != "dense" else out).sum().backward()
            if turn:  # the first warms up
                fastest[form] = min(fastest[form], time.process_time() - started)
    grouped.is_grouped = serves
    return {form: size.batch * size.context / seconds for form, seconds in fastest.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=[size.name for size in SIZES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"# Blocks of experts, {today()}",
        "",
        "One block, forward and backward, float32. Processor time on one thread, fastest of several rounds.",
        "In brackets: share of the dense block's.",
        "",
        f"Conditions: {platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}.",
        "",
        "| block | tokens | experts | dense of the active size, tokens/s | grouped | loop |",
        "|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        if given.sizes is None or size.name in given.sizes:
            speeds = measure(size, rounds=given.rounds)
            shares = [f"{speeds[form]:,.0f} ({speeds[form] / speeds['dense']:.2f})" for form in FORMS[1:]]
            lines.append(
                f"| `{size.name}` | {size.batch * size.context} | {size.active} of {size.experts} x "
                f"{size.expert_width} | {speeds['dense']:,.0f} | {shares[0]} | {shares[1]} |"
            )
    text = "\n".join(lines) + "\n"
    print(text)
    if given.out is not None:
        write_dated(given.out, "experts", text)


if __name__ == "__main__":
    main()
