"""Share of tokens whose experts change from one checkpoint of a run to the next.

    python benchmarks/routing_changes.py EXPERIMENT [--sequences 32] [--json]

Every checkpoint of a run routes the same sequences of the validation text, with the weights that are
evaluated and the balance biases of their version. A token counts in each block of experts where its set of
experts is another one than before. Runs need `train.checkpoint_interval`, and `site.keep_checkpoints` of as
many.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from asyncpp_cli.experiment.config_file import read_config
from asyncpp_cli.runs.experiment_folder import open_experiment
from stages.checkpoint import files
from stages.checkpoint.export_options import Weights
from stages.checkpoint.saved_weights import SavedWeights
from stages.config import RunConfig
from stages.data.batches import Batches
from stages.data.dataset import prepare
from stages.model.custom import make_stage
from stages.model.moe import experts as experts_module
from stages.model.moe.routing import Routing, route
from stages.model.partition import cut_model
from stages.model.stacks import member_names


@torch.no_grad()
def chosen_experts(config: RunConfig, checkpoint: Path, tokens: Tensor) -> Tensor:
    """Whether a token is sent to an expert, `(blocks, tokens, experts)`."""
    saved = SavedWeights(checkpoint, config)
    [cut] = cut_model(config.model, stages=1, context=config.data.context)
    module = make_stage(config.model, cut, context=config.data.context)
    module.prepare(device=torch.device("cpu"), dtype=torch.float32)
    for name, parameter in module.named_parameters():
        members = saved.read(member_names(name, tuple(parameter.shape)), Weights.MASTER)
        whole = torch.stack(list(members.values())) if parameter.ndim == 3 else members[name]
        parameter.copy_(whole)
    biases = saved.read([f"blocks.{block}.experts.bias" for block in module.expert_blocks], Weights.MASTER)
    sent: list[Tensor] = []

    def spied(logits: Tensor, bias: Tensor, **settings: object) -> tuple[Tensor, Tensor]:
        weights, chosen = route(logits, bias, **settings)
        sent.append(torch.zeros(len(logits), len(bias), dtype=torch.bool).scatter_(1, chosen, True))
        return weights, chosen

    experts_module.route = spied
    try:
        module(tokens, Routing(dict(zip(module.expert_blocks, biases.values(), strict=True))))
    finally:
        experts_module.route = route
    return torch.stack(sent)


def changes(config: RunConfig, checkpoints: Path, *, sequences: int) -> list[tuple[int, int, float]]:
    """(step before, step after, share of tokens and blocks whose set of experts changed)."""
    config.train.microbatch_size = sequences
    batches = Batches(config, prepare(config.data), device=torch.device("cpu"), data_rank=0, data_ranks=1)
    tokens, _ = batches.validation(0, count=1)
    steps = sorted(files.saved_steps(checkpoints))
    routed = [(step, chosen_experts(config, files.folder_of(checkpoints, step), tokens)) for step in steps]
    return [
        (before, after, float((then != now).any(dim=-1).double().mean()))
        for (before, then), (after, now) in pairwise(routed)
    ]


def main() -> None:
    """Print the changes of each run with experts."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("experiment", type=Path)
    options.add_argument("--sequences", type=int, default=32)
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    found = {}
    for run in open_experiment(given.experiment).runs:
        config = read_config(run.config_file)
        if config.model.experts:
            found[run.id] = changes(config, run.checkpoints, sequences=given.sequences)
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for name, shares in found.items():
        print(name, "  ".join(f"{before}-{after}: {share:.1%}" for before, after, share in shares))


if __name__ == "__main__":
    main()
