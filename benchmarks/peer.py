"""Training steps of a whole model on one device: ours beside transformers, tokens per second and peak memory.

    python benchmarks/peer.py --model 360m --microbatches 8 --microbatch-size 4 --out benchmarks/results
    python benchmarks/peer.py --device cpu --model micro --context 64

Ours is `big_stage.py` with the model as its only stage. The other is the class of transformers that our
export names, as its users train: float32 weights under autocast to the run's precision, each decoder layer
compiled where ours are, torch's fused AdamW, gradients clipped at 1, attention by torch's
`scaled_dot_product_attention`. Both have the same sizes, batch and number of steps, and a process of their
own. What was compiled is in torch's cache the next time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from frame import conditions, parser, publish, seconds_of

from asyncpp_cli.planner.base_config import base_of
from stages.config.run_config import RunConfig, changed
from stages.model.compiler import is_compiled
from stages.shape.hf_config import hf_config


def config_of(options: argparse.Namespace) -> RunConfig:
    changes = ["optimizer=adamw"] + [f"data.context={options.context}"] * (options.context is not None)
    config = base_of(options.model, changes).config
    return changed(config, {"train.compile": options.compile})


def training_step(config: RunConfig, options: argparse.Namespace) -> Callable[[], None]:
    """A step of the model of transformers on made-up tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    content = hf_config(config.model, context=config.data.context, dtype="float32")
    own = AutoConfig.for_model(**content | {"use_cache": False}, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_config(own).to(options.device).train()
    if is_compiled(config, device=options.device):
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=options.device == "cuda")
    shape = (options.microbatches, options.microbatch_size, config.data.context + 1)
    tokens = torch.randint(config.model.vocab_size, shape, device=options.device)
    narrow = getattr(torch, config.train.precision)
    autocast = torch.autocast(options.device, narrow, enabled=narrow is torch.bfloat16)

    def step() -> None:
        for batch in tokens:
            with autocast:
                logits = model(input_ids=batch[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            (loss / options.microbatches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The row of transformers, in this process; the first segment warms up."""
    torch.set_num_threads(options.threads)
    config = config_of(options)
    step = training_step(config, options)
    rates = []
    tokens = options.steps * options.microbatches * options.microbatch_size * config.data.context
    for _ in range(1 + options.segments):
        seconds = seconds_of(lambda: [step() for _ in range(options.steps)], device=options.device)
        rates.append(tokens / seconds)
    lower, median, upper = statistics.quantiles(rates[1:], n=4, method="inclusive")
    peak = torch.cuda.max_memory_allocated() / 1e9 if options.device == "cuda" else None
    return {"tokens_per_second": median, "quartiles": (lower, upper), "memory_gb": peak, "why_not": ""}


def row_of(arm: str, command: list[str]) -> dict[str, Any]:
    """What an arm's process prints; says why where that is nothing."""
    print(arm, file=sys.stderr, flush=True)
    ended = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=False)
    names = ("tokens_per_second", "quartiles", "memory_gb", "why_not")
    if ended.returncode != 0:
        return {"arm": arm, **dict.fromkeys(names), "why_not": f"ended with code {ended.returncode}"}
    found = json.loads(ended.stdout.splitlines()[-1])
    return {"arm": arm} | {name: found[name] for name in names}


def ours(options: argparse.Namespace) -> list[str]:
    """The command of big_stage.py that does the same."""
    given = ["--model", options.model, "--stages", 1, "--schedules", "1f1b", "--optimizer", "adamw"]
    given += ["--microbatches", options.microbatches, "--microbatch-size", options.microbatch_size]
    given += ["--steps", options.steps, "--segments", options.segments, "--recompute", "none"]
    given += ["--device", options.device, "--threads", options.threads, "--one"]
    given += ["--context", options.context] * (options.context is not None)
    given += [] if options.compile is None else ["--compile" if options.compile else "--no-compile"]
    return [str(Path(__file__).with_name("big_stage.py")), *map(str, given)]


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--model", default="360m")
    arguments.add_argument("--microbatches", type=int, default=8, help="per step")
    arguments.add_argument("--microbatch-size", type=int, default=4, help="sequences")
    arguments.add_argument("--context", type=int, help="tokens in a sequence; the model's unless given")
    arguments.add_argument("--compile", action=argparse.BooleanOptionalAction, help="as in big_stage.py")
    arguments.add_argument("--steps", type=int, default=3, help="of a segment")
    arguments.add_argument("--segments", type=int, default=3, help="measured, after one of warm-up")
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments.add_argument("--threads", type=int, default=1, help="on a CPU")
    arguments.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.one:
        print(json.dumps(measure(options)))
        return
    rows = [row_of("asyncpp", ours(options))]
    rows.append(row_of("transformers", [__file__, *sys.argv[1:], "--one"]))
    mine, others = (row["tokens_per_second"] for row in rows)
    ratio = None if mine is None or others is None else mine / others
    rows = [row | {"over transformers": ratio if row["arm"] == "asyncpp" else None} for row in rows]
    del options.one
    publish("peer", f"{options.model} beside transformers", rows, conditions(options), options)


if __name__ == "__main__":
    main()
