"""Batches, a pure function of (seed, step, data-parallel rank)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stages.config.run_config import OWN_SPLIT, RunConfig, eval_microbatches
from stages.data.dataset import Corpus
from stages.data.documents import Documents, documents_in
from stages.data.shards import Tokens

READ_AHEAD = 16
"""Batches that a host may be ahead of its device: it reads at most two for an action, and is a few actions
ahead (`stages.update.clock.AHEAD`)."""


def whole_sequences(batch: int, context: int, *, device: torch.device) -> Documents:
    """Sequences of one document each."""
    positions, bounds = documents_in(np.zeros((batch, context), dtype=np.int64), end_of_document=-1)
    ends = torch.from_numpy(bounds[:-1].astype(np.int32))
    return Documents(torch.from_numpy(positions).to(device), ends.to(device), torch.from_numpy(bounds))


class Batches:
    """Tokens and targets of each micro-batch of a run.

    Sequences are windows of `context + 1` tokens at random positions of the training tokens; of a mixture, at
    random positions of a source that is drawn with its share as probability. The positions of a step are
    drawn for all data ranks at once, from a counter-based generator (Philox) keyed by (seed, step), and each
    rank takes its rows.

    Args:
        config: of the run.
        corpus: its tokens.
        device: of the returned tensors.
        data_rank: index of this replica of the pipeline.
        data_ranks: number of replicas.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        *,
        device: torch.device,
        data_rank: int = 0,
        data_ranks: int = 1,
    ) -> None:
        self._seed = config.seed
        self._context = config.data.context
        self._size = config.train.microbatch_size
        self._microbatches = config.schedule.microbatches
        self.device = device
        self._data_rank = data_rank
        self._data_ranks = data_ranks
        self._train = Tokens(corpus.train)
        self._sources = corpus.sources
        held_out = {OWN_SPLIT: corpus.validation, **{name: each.shards for name, each in corpus.sets.items()}}
        self._validation = {name: Tokens(shards) for name, shards in held_out.items()}
        self.evaluated = {
            name: eval_microbatches(config, name, tokens=len(split))
            for name, split in self._validation.items()
        }
        """Micro-batches per evaluation of each validation set."""
        self._end_of_document = corpus.end_of_document if config.data.document_mask else None
        self._starts: tuple[int, np.ndarray] = (-1, np.empty(0))

    def tokens(self, microbatch: int) -> Tensor:
        """Input tokens `(microbatch_size, context)` of a micro-batch of the run."""
        return self._windows(microbatch)[:, :-1]

    def targets(self, microbatch: int) -> Tensor:
        """The token that follows each input token, `(microbatch_size, context)`."""
        return self._windows(microbatch)[:, 1:]

    def validation(self, index: int, *, count: int, name: str = OWN_SPLIT) -> tuple[Tensor, Tensor]:
        """Tokens and targets of micro-batch `index` of `count`, spread evenly over a validation set."""
        windows = self._read(self._validation[name], self._validation_starts(index, count=count, name=name))
        return windows[:, :-1], windows[:, 1:]

    def documents(self, microbatch: int) -> Documents | None:
        """The documents of a micro-batch of the run; None: attention is not masked by them."""
        return self._documents(self._train, self._train_starts(microbatch))

    def validation_documents(self, index: int, *, count: int, name: str = OWN_SPLIT) -> Documents | None:
        """The documents of micro-batch `index` of `count` of a validation set; None: attention is not masked
        by them."""
        starts = self._validation_starts(index, count=count, name=name)
        return self._documents(self._validation[name], starts)

    def _validation_starts(self, index: int, *, count: int, name: str) -> np.ndarray:
        last_start = len(self._validation[name]) - self._context - 1
        starts = np.linspace(0, last_start, count * self._size, dtype=np.int64)
        return starts[index * self._size : (index + 1) * self._size]

    def _windows(self, microbatch: int) -> Tensor:
        return self._read(self._train, self._train_starts(microbatch))

    def _train_starts(self, microbatch: int) -> np.ndarray:
        step, within = divmod(microbatch, self._microbatches)
        if self._starts[0] != step:
            generator = np.random.Generator(np.random.Philox(key=self._seed, counter=[0, 0, 0, step]))
            shape = (self._data_ranks, self._microbatches, self._size)
            if self._sources:
                self._starts = (step, self._mixed_starts(generator, shape))
            else:
                self._starts = (step, generator.integers(0, len(self._train) - self._context, size=shape))
        starts: np.ndarray = self._starts[1][self._data_rank, within]
        return starts

    def _mixed_starts(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        ends = np.cumsum([source.share for source in self._sources])
        # The last of the ends may be rounded below 1.
        chosen = np.searchsorted(ends[:-1], generator.random(shape), side="right")
        starts = np.empty(shape, dtype=np.int64)
        first = 0
        for number, source in enumerate(self._sources):
            here = first + generator.integers(0, source.tokens - self._context, size=shape)
            starts = np.where(chosen == number, here, starts)
            first += source.tokens
        return starts

    def rehearse(self) -> None:
        """Allocate the pinned memory of a run's batches, which torch then reuses.

        Allocating it may wait until the device is idle, and within a segment receives are open.
        """
        first = np.zeros(self._size, dtype=np.int64)
        held = [
            (self._windows_on_host(self._train, first), self._documents_on_host(self._train, first))
            for _ in range(READ_AHEAD)
        ]
        del held

    def _read(self, split: Tokens, starts: np.ndarray) -> Tensor:
        return self._on_device(self._windows_on_host(split, starts))

    def _documents(self, split: Tokens, starts: np.ndarray) -> Documents | None:
        documents = self._documents_on_host(split, starts)
        if documents is None:
            return None
        positions, ends, bounds = documents
        return Documents(self._on_device(positions), self._on_device(ends), bounds)

    def _documents_on_host(self, split: Tokens, starts: np.ndarray) -> Documents | None:
        if self._end_of_document is None:
            return None
        tokens = split.rows(starts, length=self._context)
        positions, bounds = documents_in(tokens, end_of_document=self._end_of_document)
        ends = bounds[:-1].astype(np.int32)
        return Documents(self._on_host(positions), self._on_host(ends), torch.from_numpy(bounds))

    def _windows_on_host(self, split: Tokens, starts: np.ndarray) -> Tensor:
        return self._on_host(split.rows(starts, length=self._context + 1))

    def _on_host(self, values: np.ndarray) -> Tensor:
        """In host memory, which is pinned if it is copied to a GPU."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def _on_device(self, tensor: Tensor) -> Tensor:
        # An asynchronous copy; torch reuses the pinned memory only after it has completed.
        return tensor.to(self.device, non_blocking=True)
