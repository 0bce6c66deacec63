"""Seconds per step of the matrix optimizers and their peers, in one run, on the shapes of a model's blocks.

    python benchmarks/optimizer_steps.py --json
    python benchmarks/optimizer_steps.py --models 135m,360m --blocks 1 --out benchmarks/results
    python benchmarks/optimizer_steps.py --models 10b --blocks 6 --optimizers muon --out benchmarks/results

The last is for a GPU: the blocks of one of eight stages of the 10B model.

Ours and the peer step in turn on the same weights and gradients; the fastest step of each counts. On a CPU
the figure is processor time on one thread, which other work on the machine disturbs little; on a GPU it is
wall-clock time.

A step that refreshes its bases is measured apart and spread over the interval of 10. `ratio` is the peer's
time over ours: above 1 ours is faster. A CPU with bfloat16 units can be made to work like one without by
ONEDNN_MAX_CPU_ISA=AVX2.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import pytorch_optimizer as peers
import torch
from frame import conditions, in_turns, parser, publish, seconds_of
from torch.optim import Optimizer

Weights = dict[str, torch.nn.Parameter]
Row = dict[str, Any]

SHAPES = {
    "micro": {"width": 32, "kv_width": 16, "mlp_width": 64},
    "135m": {"width": 576, "kv_width": 192, "mlp_width": 1536},
    "360m": {"width": 960, "kv_width": 320, "mlp_width": 2560},
    "10b": {"width": 4096, "kv_width": 1024, "mlp_width": 14336},
}
"""The matrices of a block, as in templates/models/."""

INTERVAL = 10
"""Steps between refreshes of the bases."""

PEERS: dict[str, Callable[[Weights], Optimizer]] = {
    "torch.optim.Muon": lambda w: torch.optim.Muon(w.values(), adjust_lr_fn="match_rms_adamw"),
    "pytorch_optimizer.Muon": lambda w: peers.Muon([{"params": list(w.values()), "use_muon": True}]),
    "pytorch_optimizer.SOAP": lambda w: peers.SOAP(w.values(), precondition_frequency=INTERVAL),
}


def our_muon(precision: str) -> Callable[[Weights], Optimizer]:
    """Our own Muon with its usual five iterations, as the peer of another iteration."""

    def built(weights: Weights) -> Optimizer:
        from optimizers.build import build_optimizer

        return build_optimizer(
            weights, name="muon", lr=1e-3, weight_decay=0.1, options={"precision": precision}
        )

    return built


PEERS |= {f"muon precision={precision}": our_muon(precision) for precision in ("float32", "bfloat16")}
COMPARISONS = (
    ("muon", {"iteration": "gram", "precision": "float32"}, "muon precision=float32"),
    ("muon", {"iteration": "gram", "precision": "bfloat16"}, "muon precision=bfloat16"),
    ("muon", {"iteration": "gram", "precision": "bfloat16"}, "torch.optim.Muon"),
    ("muon", {}, "torch.optim.Muon"),
    ("muon", {"precision": "bfloat16"}, "torch.optim.Muon"),
    ("muon", {}, "pytorch_optimizer.Muon"),
    ("muon", {"precision": "bfloat16"}, "pytorch_optimizer.Muon"),
    ("soap", {}, "pytorch_optimizer.SOAP"),
    ("basis-rotation", {}, "pytorch_optimizer.SOAP"),
)
ROTATING = {"soap", "basis-rotation"}


def weights_of(model: str, blocks: int, device: str) -> Weights:
    """Matrices of `blocks` blocks of a model, with gradients."""
    sizes = SHAPES[model]
    width, kv_width, mlp_width = sizes["width"], sizes["kv_width"], sizes["mlp_width"]
    shapes = {
        "attention.query": (width, width),
        "attention.key": (kv_width, width),
        "attention.value": (kv_width, width),
        "attention.output": (width, width),
        "mlp.gate": (mlp_width, width),
        "mlp.up": (mlp_width, width),
        "mlp.down": (width, mlp_width),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for block in range(blocks):
        for name, shape in shapes.items():
            weight = torch.nn.Parameter(torch.randn(shape, generator=generator).to(device))
            weight.grad = torch.randn(shape, generator=generator).to(device)
            weights[f"blocks.{block}.{name}.weight"] = weight
    return weights


def measure(name: str, own: dict[str, str], peer: str, *, model: str, options: argparse.Namespace) -> Row:
    """Ours and the peer in turn: warm-up, ordinary steps, and where bases turn, one refreshing step."""
    from optimizers.build import build_optimizer

    blocks, device = options.blocks, options.device
    weights = weights_of(model, blocks, device)
    pair = {
        "ours": build_optimizer(weights, name=name, lr=1e-3, weight_decay=0.1, options=own),
        "peer": PEERS[peer](weights_of(model, blocks, device)),
    }
    clock = time.perf_counter if device == "cuda" else time.process_time
    rotating = name in ROTATING
    # Ordinary steps come after the two that set things up; refreshes come in steps 11 and 12, by the
    # conventions of each, so both optimizers have had theirs once the steps from 11 on are over.
    times = in_turns(
        {
            who: partial(seconds_of, optimizer.step, device=device, clock=clock)
            for who, optimizer in pair.items()
        },
        rounds=INTERVAL + 2 if rotating else options.steps + 2,
    )
    seconds = {}
    for who, of_one in times.items():
        seconds[who] = min(of_one[2 : INTERVAL if rotating else None])
        if rotating:
            seconds[who] += max(0.0, max(of_one[INTERVAL:]) - seconds[who]) / INTERVAL
    return {
        "optimizer": name,
        "options": own,
        "model": model,
        "blocks": blocks,
        "seconds": seconds["ours"],
        "peer": peer,
        "peer_seconds": seconds["peer"],
        "ratio": seconds["peer"] / seconds["ours"],
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", default="135m", help="of " + ", ".join(SHAPES) + "; commas between")
    arguments.add_argument("--optimizers", default="muon,soap,basis-rotation", help="commas between")
    arguments.add_argument("--blocks", type=int, default=1, help="blocks of the model")
    arguments.add_argument("--steps", type=int, default=3, help="steps measured, after two of warm-up")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for model in options.models.split(","):
        for name, own, peer in COMPARISONS:
            if name in options.optimizers.split(","):
                print(f"{model}: {name} {own}, {peer}", file=sys.stderr, flush=True)
                rows.append(measure(name, own, peer, model=model, options=options))
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    where = conditions(options, isa=isa, pytorch_optimizer=version("pytorch_optimizer"))
    suffix = (f"-{isa.lower()}" if isa else "") + ("-cuda" if options.device == "cuda" else "")
    publish(f"optimizers{suffix}", "Optimizers compared with their peers", rows, where, options)


if __name__ == "__main__":
    main()
