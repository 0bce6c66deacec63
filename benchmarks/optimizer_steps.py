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
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import pytorch_optimizer as peers
import torch
from dated import write_dated
from torch.optim import Optimizer

Weights = dict[str, torch.nn.Parameter]

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


@dataclass(frozen=True)
class Row:
    """One comparison."""

    optimizer: str
    options: dict[str, str]
    model: str
    blocks: int
    seconds: float
    peer: str
    peer_seconds: float
    ratio: float


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


def seconds_of(optimizer: Optimizer, device: str) -> float:
    """Of one step."""
    if device == "cuda":
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        return time.perf_counter() - start
    start = time.process_time()
    optimizer.step()
    return time.process_time() - start


def measure(
    name: str, options: dict[str, str], peer: str, *, model: str, blocks: int, steps: int, device: str
) -> Row:
    """Ours and the peer in turn: warm-up, `steps` ordinary steps, and where bases turn, one refreshing
    step."""
    from optimizers.build import build_optimizer

    weights = weights_of(model, blocks, device)
    ours = build_optimizer(weights, name=name, lr=1e-3, weight_decay=0.1, options=options)
    pair = [ours, PEERS[peer](weights_of(model, blocks, device))]
    rotating = name in ROTATING
    times: list[list[float]] = [[], []]
    # Ordinary steps come after the two that set things up; refreshes come in steps 11 and 12, by the
    # conventions of each, so both optimizers have had theirs once the steps from 11 on are over.
    count = INTERVAL + 2 if rotating else steps + 2
    for _ in range(count):
        for which, optimizer in enumerate(pair):
            times[which].append(seconds_of(optimizer, device))
    if rotating:
        results = []
        for of_one in times:
            ordinary, refreshing = min(of_one[2:INTERVAL]), max(of_one[INTERVAL:])
            results.append(ordinary + max(0.0, refreshing - ordinary) / INTERVAL)
    else:
        results = [min(of_one[2:]) for of_one in times]
    return Row(name, options, model, blocks, results[0], peer, results[1], results[1] / results[0])


def conditions(device: str, threads: int) -> str:
    """Hardware and versions, in one line."""
    chip = torch.cuda.get_device_name() if device == "cuda" else processor()
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA")
    limited = f", ONEDNN_MAX_CPU_ISA={isa}" if isa else ""
    return (
        f"{chip}, {threads} thread(s){limited}; torch {torch.__version__}, "
        f"pytorch_optimizer {version('pytorch_optimizer')}, "
        f"Python {platform.python_version()}"
    )


def processor() -> str:
    """Name of the CPU and whether it multiplies bfloat16 in hardware."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown CPU"
    name = next((line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line), "CPU")
    return f"{name} ({'with' if 'avx512_bf16' in text or 'amx_bf16' in text else 'without'} bfloat16 units)"


def markdown(rows: list[Row], where: str) -> str:
    """A table of the rows under their conditions."""
    lines = [
        where + ".",
        "",
        "| optimizer | model | blocks | s per step | peer | s per step | peer / ours |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = " ".join([row.optimizer, *(f"{key}={value}" for key, value in row.options.items())])
        cells = [name, row.model, row.blocks, f"{row.seconds:.4f}", row.peer, f"{row.peer_seconds:.4f}"]
        lines.append("| " + " | ".join(map(str, [*cells, f"{row.ratio:.2f}"])) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="135m", help="of " + ", ".join(SHAPES) + "; commas between")
    parser.add_argument("--optimizers", default="muon,soap,basis-rotation", help="commas between")
    parser.add_argument("--blocks", type=int, default=1, help="blocks of the model")
    parser.add_argument("--steps", type=int, default=3, help="steps measured, after two of warm-up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="rows as JSON on standard output")
    parser.add_argument("--out", type=Path, help="folder for a dated Markdown table")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for model in arguments.models.split(","):
        for name, options, peer in COMPARISONS:
            if name in arguments.optimizers.split(","):
                print(f"{model}: {name} {options}, {peer}", file=sys.stderr, flush=True)
                sizes = {"blocks": arguments.blocks, "steps": arguments.steps, "device": arguments.device}
                rows.append(measure(name, dict(options), peer, model=model, **sizes))
    where = conditions(arguments.device, arguments.threads)
    if arguments.json:
        print(json.dumps([{**asdict(row), "conditions": where} for row in rows], indent=2))
    else:
        print(markdown(rows, where))
    if arguments.out:
        isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
        suffix = (f"-{isa.lower()}" if isa else "") + ("-cuda" if arguments.device == "cuda" else "")
        text = f"# Optimizers compared with their peers\n\n{markdown(rows, where)}"
        write_dated(arguments.out, f"optimizers{suffix}", text)


if __name__ == "__main__":
    main()
