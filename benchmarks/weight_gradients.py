"""Gradients of bfloat16 weights, added to their float32 buffer: milliseconds and error of each form.

    python benchmarks/weight_gradients.py --out benchmarks/results

Rounded: a bfloat16 product (or sum of an embedding's rows), a copy of it in float32, and a sum, as by
autograd. Wide: factors turned to float32, and their product added. Ours: `stages.model.weight_gradient`. The
forms take turns, and the fastest round of each counts: processor time on one thread, on a GPU time until it
has finished.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from dated import today, write_dated
from torch import Tensor

from stages.model.weight_gradient import add_product, add_rows

SIZES = (
    ("nano, mlp.gate", 1024, 128, 384),
    ("135m, attention.query", 2048, 576, 576),
    ("135m, mlp.gate", 2048, 576, 1536),
    ("360m, mlp.gate", 2048, 960, 2560),
)
"""Of a matrix: its name, tokens, inputs and outputs."""
EMBEDDINGS = (("nano, embedding", 1024, 128, 256), ("135m, embedding", 2048, 576, 49152))
"""Likewise: name, tokens, width and vocabulary."""


def matrix_forms(gradient: Tensor, given: Tensor) -> dict[str, Callable[[Tensor], object]]:
    return {
        "rounded": lambda total: total.add_((gradient.t() @ given).float()),
        "wide": lambda total: total.addmm_(gradient.t().float(), given.float()),
        "ours": lambda total: add_product(total, gradient, given),
    }


def embedding_forms(gradient: Tensor, tokens: Tensor) -> dict[str, Callable[[Tensor], object]]:
    rows = torch.ops.aten.embedding_dense_backward
    return {
        "rounded": lambda total: total.add_(rows(gradient, tokens, len(total), -1, False).float()),
        "wide": lambda total: total.add_(rows(gradient.float(), tokens, len(total), -1, False)),
        "ours": lambda total: add_rows(total, gradient, tokens),
    }


def line(
    name: str, forms: dict[str, Callable[[Tensor], object]], total: Tensor, exact: Tensor, *, rounds: int
) -> str:
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    errors = []
    for add in forms.values():
        add(total.zero_())
        errors.append(float((total.double() - exact).norm() / exact.norm()))
    for _ in range(rounds):
        for form, add in forms.items():
            started = now(total)
            add(total)
            seconds[form].append(now(total) - started)
    times = [min(of_form) for of_form in seconds.values()]
    cells = [f"{1e3 * best:.2f}" for best in times] + [f"{times[2] / times[0]:.2f}"]
    return f"| {' | '.join([name, *cells, *(f'{error:.1e}' for error in (errors[0], errors[2]))])} |"


def now(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description="Gradients of bfloat16 weights, added in float32.")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each form")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="folder of the dated page; default: print it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(options.device)

    lines = []
    for name, tokens, inputs, outputs in SIZES:
        gradient, given = random(tokens, outputs), random(tokens, inputs)
        exact = gradient.double().t() @ given.double()
        total = torch.zeros(outputs, inputs, device=options.device)
        lines.append(line(name, matrix_forms(gradient, given), total, exact, rounds=options.rounds))
    for name, tokens, width, vocabulary in EMBEDDINGS:
        gradient = random(tokens, width)
        # As in text, few tokens are frequent.
        ids = (vocabulary * torch.rand(tokens, generator=generator) ** 4).long().to(options.device)
        total = torch.zeros(vocabulary, width, device=options.device)
        exact = total.double().index_add_(0, ids, gradient.double())
        lines.append(line(name, embedding_forms(gradient, ids), total, exact, rounds=options.rounds))
    columns = [
        "gradient",
        "rounded, ms",
        "wide, ms",
        "ours, ms",
        "ours / rounded",
        "error, rounded",
        "error, ours",
    ]
    text = f"""# Gradients of bfloat16 weights, {today()}

| {" | ".join(columns)} |
|{"---|" * len(columns)}
{chr(10).join(lines)}

One micro-batch's gradient of one weight is added to its float32 buffer, on {options.device}.
Error: relative, against float64.
"""
    if options.out is None:
        print(text)
    else:
        write_dated(options.out, "weight-gradients", text)


if __name__ == "__main__":
    main()
