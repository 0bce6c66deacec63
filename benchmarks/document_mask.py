"""Tokens per second with and without a mask by documents: forward and backward of a small decoder on one
thread, on documents of random lengths (geometric), both in turns. Processor time, so that other work on the
machine counts less; the ratio is of one run.

    python -m benchmarks.document_mask --out benchmarks/results
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.frame import conditions, in_turns, parser, publish, seconds_of
from stages.config.run_config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from stages.data.batches import Batches
from stages.data.dataset import Corpus
from stages.data.documents import attention_share
from stages.data.shards import Shard
from stages.model.decoder import Stage, initialise
from stages.shape.partition import cut_model

TOKENS = 1 << 20
END = 0


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--contexts", default="256,1024,2048", help="tokens in a sequence, commas between")
    options.add_argument("--lengths", default="100,500,2000", help="mean tokens in a document")
    options.add_argument("--tokens", type=int, default=2048, help="in a micro-batch")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--width", type=int, default=128)
    options.add_argument("--layers", type=int, default=2)
    given = options.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for length in map(int, given.lengths.split(",")):
            corpus = made_up(Path(folder) / f"{length}.bin", length=length)
            for context in map(int, given.contexts.split(",")):
                config = config_of(given.width, given.layers, context, given.tokens // context)
                plain, masked = measured(config, corpus, rounds=given.rounds)
                rows.append(
                    {
                        "context": context,
                        "mean document": length,
                        "share of attention within documents": attention_share(corpus, context=context),
                        "tokens/s without mask": given.tokens / plain,
                        "tokens/s with mask": given.tokens / masked,
                        "with / without": plain / masked,
                    }
                )
    where = conditions(given, threads=1, precision="float32")
    title = "Attention within documents: tokens per second on a CPU"
    publish("document-mask", title, rows, where, given, seeds=f"none; {given.rounds} rounds")


def made_up(file: Path, *, length: int) -> Corpus:
    """Random tokens, each of which ends a document with the same probability."""
    generator = np.random.default_rng(length)
    tokens = generator.integers(1, 256, size=TOKENS)
    tokens[generator.random(TOKENS) < 1 / length] = END
    tokens.astype("<u2").tofile(file)
    shard = Shard(file=file, dtype="uint16", tokens=TOKENS)
    return Corpus(
        train=(shard,),
        validation=(shard,),
        bytes_per_token=None,
        unigram_bits_per_byte=None,
        sha256="",
        end_of_document=END,
    )


def config_of(width: int, layers: int, context: int, sequences: int) -> RunConfig:
    return RunConfig(
        schedule=ScheduleConfig(name="1f1b"),
        optimizer=OptimizerConfig(name="adamw"),
        model=ModelConfig(
            name="measured", layers=layers, width=width, heads=4, kv_heads=4, mlp_width=int(width * 8 / 3)
        ),
        data=DataConfig(context=context, document_mask=True),
        train=TrainConfig(steps=1, microbatch_size=sequences),
    )


def measured(config: RunConfig, corpus: Corpus, *, rounds: int) -> tuple[float, float]:
    """Median processor time of a micro-batch's forward and backward, without and with the mask, seconds."""
    context = config.data.context
    (cut,) = cut_model(config.model, stages=1, context=context)
    module = Stage(config.model, cut, context=context)
    module.prepare(device=torch.device("cpu"), dtype=torch.float32)
    for name, parameter in module.named_parameters():
        initialise(parameter, name=name, seed=0, model=config.model)
    batches = Batches(config, corpus, device=torch.device("cpu"))
    number = iter(range(10**6))

    def work(*, masked: bool, microbatch: int) -> None:
        documents = batches.documents(microbatch) if masked else None
        loss = module(batches.tokens(microbatch), targets=batches.targets(microbatch), documents=documents)
        loss.backward()

    def arm(masked: bool) -> Callable[[], float]:
        return lambda: seconds_of(
            partial(work, masked=masked, microbatch=next(number)), clock=time.process_time
        )

    results = in_turns({"plain": arm(False), "masked": arm(True)}, rounds=rounds + 1)
    plain, masked = (statistics.median(results[name][1:]) for name in ("plain", "masked"))
    return plain, masked


if __name__ == "__main__":
    main()
