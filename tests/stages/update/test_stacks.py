"""Stacks of matrices: an optimizer, the data ranks and a checkpoint handle each matrix alone."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.small_runs import Rows, replayed, small_config
from torch import Tensor, nn

import optimizers
from stages.config.run_config import ModelConfig, RunConfig, changed
from stages.shape.optimizer_sharding import assign_owners, runs_between
from stages.shape.spec import member_count, member_names, member_shape
from stages.trainer import replay

EXPERTS, EXPERT_WIDTH = 5, 8


class Experts(nn.Module):
    """All experts on every token, weighted by a router. The experts' matrices are two stacks, or in lists as
    parameters of the same names as the members of these stacks."""

    def __init__(self, width: int, *, stacked: bool) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        for name, rows, columns in (("up", EXPERT_WIDTH, width), ("down", width, EXPERT_WIDTH)):
            if stacked:
                setattr(self, name, nn.Parameter(torch.empty(EXPERTS, rows, columns)))
            else:
                matrices = [nn.Parameter(torch.empty(rows, columns)) for _ in range(EXPERTS)]
                setattr(self, name, nn.ParameterList(matrices))
        self.norm = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        def whole(matrices: Tensor | nn.ParameterList) -> Tensor:
            return matrices if isinstance(matrices, Tensor) else torch.stack(list(matrices))

        shares = self.router(x).softmax(-1)
        hidden = F.silu(torch.einsum("btw,ehw->bteh", self.norm(x), whole(self.up)))
        return x + torch.einsum("bte,bteh,ewh->btw", shares, hidden, whole(self.down))


def stacked(config: ModelConfig, context: int) -> tuple[nn.Module, list[nn.Module], nn.Module]:
    return _parts(config, stacked=True)


def in_lists(config: ModelConfig, context: int) -> tuple[nn.Module, list[nn.Module], nn.Module]:
    return _parts(config, stacked=False)


def _parts(config: ModelConfig, *, stacked: bool) -> tuple[nn.Module, list[nn.Module], nn.Module]:
    blocks: list[nn.Module] = [Experts(config.width, stacked=stacked) for _ in range(config.layers)]
    embedding = nn.Embedding(config.vocab_size, config.width)
    return embedding, blocks, nn.Linear(config.width, config.vocab_size, bias=False)


def config_of(factory: str, *, optimizer: str, data: int = 1, steps: int = 3) -> RunConfig:
    config = small_config(
        "2bw", data=data, layers=2, optimizer=optimizer, coefficient=1.0, steps=steps, lr=1e-3
    )
    return changed(config, {"model.factory": f"{__name__}:{factory}"})


@pytest.mark.parametrize("optimizer", optimizers.NAMES)
def test_a_stack_is_updated_as_its_matrices_are_one_by_one(optimizer: str) -> None:
    """To the bit, whichever data rank owns which of them."""
    for data in (1, 3):
        results = []
        for factory in ("stacked", "in_lists"):
            rows = replayed(config_of(factory, optimizer=optimizer, data=data))
            result = rows.result
            results.append((result.train_losses, result.val_losses, rows.of_kind("end")[0]["weights_sha256"]))
            assert "blocks.1.down.4" in result.weights
            assert all(row["grad_norm"] > 0 for row in rows.of_kind("step"))
        assert results[0] == results[1]


def test_a_run_resumes_with_other_owners_of_its_stacks(tmp_path: Path) -> None:
    def run(steps: int, data: int, factory: str) -> list[float]:
        config = config_of(factory, optimizer="muon", data=data, steps=steps)
        config = changed(config, {"schedule.microbatches": 6 // data, "train.checkpoint_interval": 2})
        return replay(config, recorder=Rows(), checkpoints=tmp_path).train_losses

    run(2, 3, "stacked")
    resumed = run(4, 1, "in_lists")
    again = tmp_path / "whole"
    config = config_of("stacked", optimizer="muon", steps=4)
    config = changed(config, {"schedule.microbatches": 6})
    whole = replay(config, recorder=Rows(), checkpoints=again).train_losses
    assert resumed == pytest.approx(whole[2:], rel=1e-5)


SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 300)), st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
    ),
    min_size=1,
    max_size=12,
)


@given(shapes=SHAPES, data_ranks=st.integers(1, 5))
def test_every_matrix_has_one_owner_and_parts_differ_by_one_at_most(
    shapes: list[tuple[int, ...]], data_ranks: int
) -> None:
    shared = assign_owners(shapes, data_ranks=data_ranks)
    sizes = [prod(member_shape(shape)) for shape in shapes for _ in range(member_count(shape))]
    assert sorted(number for owned in shared.owned for number in owned) == list(range(len(sizes)))
    assert shared.parts == tuple(sum(sizes[number] for number in owned) for owned in shared.owned)
    assert max(shared.parts) - min(shared.parts) <= max(sizes)
    entries = [entry for runs in shared.runs for run in runs for entry in range(*run)]
    assert sorted(entries) == list(range(sum(sizes)))
    # Runs of a rank hold its members in their order, each in one piece.
    starts, entry = {}, 0
    for parameter in shared.order:
        starts[parameter] = entry
        entry += prod(shapes[parameter])
    places = [
        range(starts[number] + index * size, starts[number] + (index + 1) * size)
        for number, shape in enumerate(shapes)
        for size in [prod(member_shape(shape))]
        for index in range(member_count(shape))
    ]
    for owned, runs in zip(shared.owned, shared.runs, strict=True):
        in_runs = [entry for run in runs for entry in range(*run)]
        assert in_runs == [entry for number in owned for entry in places[number]]
        assert all(before[1] != after[0] for before, after in pairwise(runs))


@given(
    lengths=st.lists(st.integers(1, 6), max_size=5),
    gap=st.integers(1, 3),
    first=st.integers(0, 12),
    count=st.integers(0, 12),
)
def test_runs_between_two_entries(lengths: list[int], gap: int, first: int, count: int) -> None:
    runs, start = [], 0
    for length in lengths:
        runs.append((start, start + length))
        start += length + gap
    entries = [entry for run in runs for entry in range(*run)]
    chosen = runs_between(runs, first, first + count)
    assert [entry for run in chosen for entry in range(*run)] == entries[first : first + count]


def test_members_of_a_stack_have_names_of_their_own() -> None:
    assert member_names("blocks.0.up", (2, 3, 4)) == ("blocks.0.up.0", "blocks.0.up.1")
    assert member_names("blocks.0.up", (3, 4)) == ("blocks.0.up",)
