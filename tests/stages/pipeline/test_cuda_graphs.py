"""Graphs of a stage on a CPU: a recorder runs what it recorded again, and objects to what a CUDA graph could
not follow, an address outside of the graphs that is another than at first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.small_runs import Rows, in_processes, ranks_of, small_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncpp_cli.planner.memory import planned_memory
from asyncpp_cli.planner.peak_memory import backward_bytes, forward_bytes
from stages.comm.process import Process
from stages.config.run_config import RunConfig, changed
from stages.pipeline import cuda_graphs
from stages.pipeline.warm_up import warm_up_ranks
from stages.rehearsal.rank import rehearse_rank
from stages.resolve.facts import facts
from stages.shape.partition import cut_of
from stages.trainer import replay, train
from stages.weights.weight_versions import WeightVersions


class Outside(TorchDispatchMode):
    """Notes the storages that operators read or write and no operator of `made` has made."""

    def __init__(self, made: dict[int, Any]) -> None:
        super().__init__()
        self._made = made
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = self._storages((args, kwargs))
        self.addresses |= given.keys() - self._made.keys()
        out = func(*args, **(kwargs or {}))
        self._made.update((key, kept) for key, kept in self._storages(out).items() if key not in given)
        return out

    def _storages(self, values: Any) -> dict[int, Any]:
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        # Wrapped numbers have one element, as a graph's constants.
        return {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.numel() > 1}


def recorder() -> cuda_graphs.Record:
    """Of one slot."""
    made: dict[int, Any] = {}

    def record(run: Callable[[], None]) -> Callable[[], None]:
        known: list[set[int]] = []

        def again() -> None:
            with Outside(made) as outside:
                run()
            known.append(outside.addresses)
            assert known[0] == outside.addresses, "an address has changed"

        return again

    return record


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "recorder", recorder)


def graphed(config: RunConfig) -> RunConfig:
    return changed(config, {"train.cuda_graphs": True})


CASES: list[dict[str, Any]] = [
    {"schedule": "2bw", "precision": "bfloat16", "recompute": "selective"},
    {"schedule": "2bw", "stages": 3, "microbatches": 6, "ahead": 2, "data": 2},
    {"schedule": "1f1b", "data": 2, "recompute": "full"},
    {"schedule": "2bw-v", "split": True},
    {"schedule": "dualpipe-v", "microbatches": 4},
    {"schedule": "paci"},
    {"schedule": "2bw", "shard_head": True},
]


def settings(**case: Any) -> dict[str, Any]:
    return {"steps": 4, "eval_interval": 3, "layers": 4} | case


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
@pytest.mark.slow
def test_runs_with_graphs_have_the_bits_of_runs_without(case: dict[str, Any]) -> None:
    plain = replay(small_config(**settings(**case)), recorder=Rows())
    with_graphs = replay(graphed(small_config(**settings(**case))), recorder=Rows())
    assert with_graphs.train_losses == plain.train_losses
    assert with_graphs.val_losses == plain.val_losses
    assert all(torch.equal(weight, plain.weights[name]) for name, weight in with_graphs.weights.items())


def _trained(process: Process, config: RunConfig) -> list[float]:
    cuda_graphs.recorder = recorder
    return train(config, process=process, recorder=Rows()).train_losses


def test_processes_have_the_bits_of_a_replay() -> None:
    config = small_config(**settings(schedule="2bw"))
    plain = replay(config, recorder=Rows()).train_losses
    assert plain in [losses for (losses,) in in_processes(_trained, [graphed(config)], size=2)]


@pytest.mark.usefixtures("recording")
def test_a_weight_version_that_moves_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    config = graphed(small_config(**settings(schedule="2bw")))
    oldest = WeightVersions.oldest

    def moved(self: WeightVersions) -> Any:
        replica = oldest(self)
        for parameter in replica.parameters:
            parameter.data = parameter.data.clone()
        return replica

    monkeypatch.setattr(WeightVersions, "oldest", moved)
    with pytest.raises(RuntimeError, match="not where they were when their CUDA graph was captured"):
        replay(config, recorder=Rows())
    # Without the product's own check, the recorder finds it.
    monkeypatch.setattr(cuda_graphs._ReplayedPass, "_check", lambda self: None)
    with pytest.raises(AssertionError, match="an address has changed"):
        replay(config, recorder=Rows())


@pytest.mark.usefixtures("recording")
def test_a_slot_of_two_microbatches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    config = graphed(small_config(**settings(schedule="2bw")))
    forward = cuda_graphs.GraphedStage.forward

    def keeping(self: cuda_graphs.GraphedStage, *args: Any, **kwargs: Any) -> Any:
        slots = list(self._free)
        made = forward(self, *args, **kwargs)
        self._free[:] = slots
        return made

    monkeypatch.setattr(cuda_graphs.GraphedStage, "forward", keeping)
    with pytest.raises(RuntimeError, match="no slot of the stage's CUDA graphs is free"):
        replay(config, recorder=Rows())


@pytest.mark.usefixtures("recording")
def test_capture_leaves_nothing_behind() -> None:
    config = graphed(small_config(**settings(schedule="2bw", stages=1)))
    [rank] = ranks_of(config)
    weights = rank.stages[0].weights
    where = [parameter.grad for parameter in weights.replicas[0].parameters]
    warm_up_ranks([rank], facts(config), device=torch.device("cpu"))
    assert [parameter.grad for parameter in weights.replicas[0].parameters] == where
    assert not any(buffer.flat.any() for buffer in weights.gradients)


@pytest.mark.usefixtures("recording")
def test_the_plan_counts_slots() -> None:
    config = small_config(**settings(schedule="2bw-v", precision="bfloat16"), **{"site.device": "cuda"})
    plain = planned_memory(config)
    graphed(config)
    cuts = cut_of(config)
    for rank, before, after in zip(ranks_of(config), plain, planned_memory(config), strict=True):
        warm_up_ranks([rank], facts(config), device=torch.device("cpu"))
        held = 0
        for stage, graphs in rank.executor._graphs.items():
            for slot in graphs._free:
                tensors = [value for value in vars(slot).values() if isinstance(value, Tensor)]
                held += sum(tensor.nbytes for tensor in tensors)
                held += max(forward_bytes(config, cuts[stage]), backward_bytes(config, cuts[stage]))
        assert after["temporary"] - before["temporary"] == held
        assert after["activations"] >= before["activations"]


@pytest.mark.parametrize("schedule", ["2bw", "zero-bubble"])
@pytest.mark.slow
def test_a_rehearsal_runs_them(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = graphed(small_config(schedule, microbatches=4, steps=20))
    config = changed(config, {"train.compile": False})
    found = rehearse_rank(config, rank=0, data_rank=0, device="cuda")
    assert not found.faults
    assert found.kept["other"] > 0


def test_without_a_gpu_it_is_said_what_to_set() -> None:
    with pytest.raises(RuntimeError, match=r"there is no GPU here; set train\.cuda_graphs: false"):
        replay(graphed(small_config()), recorder=Rows())
