"""Trains the model under torch's `fully_shard`, as one of two ranks, and writes the memory that it takes.

    python fully_sharded.py BACKEND RANK FOLDER

`BACKEND` is `gloo`, or `fake`: a group of one process that exchanges nothing. gloo holds copies of what it
exchanges until its threads drop them, so what is held at a time can be told with `fake` alone.
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from asyncpp_cli.planner.base_config import base_of
from stages.config.run_config import RunConfig, changed
from stages.model.decoder import Stage
from stages.shape.partition import cut_model

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "uneven rows": {"heads": 2, "mlp_width": 683},
    "activations": {"width": 96, "mlp_width": 257, "microbatch_size": 8},
    "logits": {"width": 64, "mlp_width": 171, "vocab_size": 8000},
    "root": {"layers": 2, "vocab_size": 8000},
    "root again": {"layers": 2, "vocab_size": 8000, "microbatches": 2},
    "bfloat16": {"precision": "bfloat16"},
    "full": {"recompute": "full", "microbatch_size": 4},
    "micro-batches": {"microbatches": 2},
    "weights kept": {"microbatches": 2, "reshard": False, "precision": "bfloat16"},
    "reduced once": {"microbatches": 2, "reduce_each": False},
    "all kept": {"microbatches": 3, "reshard": False, "reduce_each": False},
}
"""What differs from the run of `config_of`, and from full resharding.

A root unit that is most of the model is not among them in bfloat16: a CPU copies its gradients once more
before they are reduced, which a GPU's kernel (`chunk_cat`) does not.
"""
RANKS = 2


def config_of(case: dict[str, Any]) -> RunConfig:
    config = base_of("7b", ["optimizer=adamw"]).config
    model = {"layers": 6, "width": 256, "heads": 4, "kv_heads": 2, "mlp_width": 684, "vocab_size": 512}
    return changed(
        config,
        {f"model.{key}": case.get(key, value) for key, value in model.items()}
        | {
            "data.context": 64,
            "site.device": "cpu",
            "train.compile": False,
            "train.precision": case.get("precision", "float32"),
            "train.recompute": case.get("recompute", "none"),
            "train.microbatch_size": case.get("microbatch_size", 1),
            "schedule.microbatches": case.get("microbatches", 1),
        },
    )


def model_of(config: RunConfig, *, reshard: bool) -> Stage:
    (cut,) = cut_model(config.model, stages=1, context=config.data.context)
    model = Stage(config.model, cut, context=config.data.context)
    model.prepare(device=torch.device("cpu"), dtype=torch.float32)
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = {"mp_policy": narrow} if config.train.precision == "bfloat16" else {}
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for block in model.blocks.values():
        if config.train.recompute == "full":
            again = block.forward
            block.forward = lambda *given, again=again: checkpoint(again, *given, use_reentrant=False)  # type: ignore[method-assign]
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def measured(case: dict[str, Any]) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state, and the most of all tensors in a step."""
    config = config_of(case)
    model = model_of(config, reshard=case.get("reshard", True))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(config.model.vocab_size, (config.train.microbatch_size, config.data.context))

    def step() -> int:
        for number in range(config.schedule.microbatches):
            last = number == config.schedule.microbatches - 1
            model.set_requires_gradient_sync(last or case.get("reduce_each", True))
            if not case.get("reduce_each", True) and not case.get("reshard", True):
                model.set_reshard_after_backward(last)
            model(tokens, targets=tokens).backward()
        gradients = bytes_of(parameter.grad for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        return gradients

    step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        gradients = step()
    # What was there before is not among the events.
    events = sorted(
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    parameters = bytes_of(model.parameters())
    state = bytes_of(value for of_one in optimizer.state.values() for value in of_one.values())
    most = max(accumulate(size for _, size in events))
    return {
        "parameters": parameters,
        "gradients": gradients,
        "state": state,
        "peak": parameters + state + most,
    }


def bytes_of(tensors: Any) -> int:
    """Of the storages of sharded tensors, each once."""
    storages = [tensor.to_local().untyped_storage() for tensor in tensors if isinstance(tensor, DTensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def main(backend: str, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    else:
        store = dist.FileStore(str(folder / "store"), RANKS)
        dist.init_process_group(backend, rank=rank, world_size=RANKS, store=store)
    torch.manual_seed(rank)
    found = {name: measured(case) for name, case in CASES.items()}
    (folder / f"{backend}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
