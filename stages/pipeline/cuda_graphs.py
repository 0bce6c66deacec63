"""Forwards and backwards of a stage as CUDA graphs: the host launches each as a whole.

A graph reads and writes fixed addresses. Those are

- the weights of a replica and the gradients of a buffer, which are flat, allocated once and written in place;
- the tensors of a slot, one for each micro-batch in flight: what a stage is given, and what it returns. The
  executor's tensors are copied into them and out of them, since messages may be on their way for longer.

So there is a pair of graphs (three, where the backward is split) for each slot, replica and gradient buffer.
Those of a slot share a pool of memory: a micro-batch keeps its activations there from its forward to the end
of its backward, and no other of the slot runs in between. Slots do not share one, since a graph also writes
where it only has temporaries, whatever another keeps there.

Nothing in a graph waits for the host, sends, or draws random numbers; `stages.resolve` refuses the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from schedules.actions import Action, Op
from stages.model.gradients.whole_gradients import WholeGradients
from stages.pipeline.stage_pass import Pass, run_stage
from stages.weights.weight_versions import Replica, WeightVersions

Replay = Callable[[], None]
Record = Callable[[Callable[[], None]], Replay]
"""Captures what a function launches; the result launches it again."""


def recorder() -> Record:
    """Records graphs that share a pool of memory of their own.

    Raises:
        RuntimeError: this process has no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "train.cuda_graphs is true, but there is no GPU here; set train.cuda_graphs: false"
        )
    pool = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may ask the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
        return graph.replay

    return record


@dataclass(frozen=True)
class _Graphs:
    """Graphs of one slot on one replica and gradient buffer."""

    forward: Replay
    backward: Replay
    weight_half: Replay | None
    addresses: tuple[torch.UntypedStorage, ...]
    """What they read and write outside of the slot; held, so that no other storage takes its place."""


class _Slot:
    """Fixed tensors of one micro-batch in flight in one stage."""

    def __init__(self, weights: WeightVersions, *, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        module, flat = weights.replicas[0].module, weights.gradients[0].flat
        device = flat.device
        tokens = torch.zeros(shape[:2], dtype=torch.long, device=device)
        activation = torch.zeros(shape, dtype=dtype, device=device)
        self.given = tokens if module.embedding is not None else activation.clone()
        self.targets = tokens.clone() if module.head is not None else None
        loss = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=device)
        self.output = activation.clone() if module.head is None else loss
        self.gradient = torch.zeros_like(self.output)
        self.input_gradient = None if module.embedding is not None else activation
        self.graphs: dict[tuple[int, int, bool], _Graphs] = {}
        """By replica, gradient buffer, and whether the backward is split."""
        self.is_taken = False

    def capture(self, record: Record, replica: Replica, *, split: bool) -> _Graphs:
        """Record the graphs of a replica, with gradients where its parameters' now are."""
        passed: list[Pass] = []

        def forward() -> None:
            output, made = run_stage(
                replica.module, self.given, targets=self.targets, loss_share=1, split=split
            )
            self.output.copy_(output)
            passed.append(made)

        def backward() -> None:
            passed[0].backward(self.gradient)
            if self.input_gradient is not None:
                self.input_gradient.copy_(passed[0].input_gradient())
            if not split:
                passed.clear()

        def weight_half() -> None:
            passed.pop().weight_half()

        # Each in turn, as they will run: memory that a backward frees is used again by what follows it.
        return _Graphs(
            record(forward), record(backward), record(weight_half) if split else None, _addresses(replica)
        )


def _addresses(replica: Replica) -> tuple[torch.UntypedStorage, ...]:
    """Memory of the weights and of the gradients, each of which is one flat buffer."""
    parameter = replica.parameters[0]
    assert parameter.grad is not None
    return tuple(tensor.untyped_storage() for tensor in (replica.flat, parameter, parameter.grad))


class _ReplayedPass:
    """A micro-batch in a slot."""

    reports = False

    def __init__(
        self, stage: GraphedStage, slot: _Slot, graphs: _Graphs, *, replica: Replica, loss_share: int
    ) -> None:
        self._stage, self._slot, self._graphs, self._replica = stage, slot, graphs, replica
        self._loss_share = loss_share
        self.is_split = graphs.weight_half is not None

    def backward(self, gradient: Tensor | None, *, whole: WholeGradients | None = None) -> None:
        self._check()
        if gradient is None:
            self._slot.gradient.fill_(1.0).div_(self._loss_share)
        else:
            self._slot.gradient.copy_(gradient)
        self._graphs.backward()
        if not self.is_split:
            self._stage.free(self._slot)

    def input_gradient(self) -> Tensor:
        assert self._slot.input_gradient is not None
        return self._slot.input_gradient.clone()

    def weight_half(self, whole: WholeGradients | None = None) -> None:
        assert self._graphs.weight_half is not None
        self._check()
        self._graphs.weight_half()
        self._stage.free(self._slot)

    def _check(self) -> None:
        now = [storage._cdata for storage in _addresses(self._replica)]
        if now != [storage._cdata for storage in self._graphs.addresses]:
            raise RuntimeError(
                "weights or gradients are not where they were when their CUDA graph was captured"
            )


class GraphedStage:
    """The graphs of one stage.

    Args:
        weights: of the stage.
        slots: the most micro-batches in flight, those between the halves of their backward included.
        kinds: of backwards in the run: whether they are split.
        shape: of an activation, `(batch, context, width)`.
        dtype: likewise.
    """

    def __init__(
        self,
        weights: WeightVersions,
        *,
        slots: int,
        kinds: Iterable[bool],
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self._weights = weights
        self._free = [_Slot(weights, shape=shape, dtype=dtype) for _ in range(slots)]
        kinds = list(kinds)
        for slot in self._free:
            record = recorder()
            for buffer in range(len(weights.gradients)):
                with weights.adding_to(buffer):
                    for (number, replica), split in product(enumerate(weights.replicas), kinds):
                        slot.graphs[number, buffer, split] = slot.capture(record, replica, split=split)

    def forward(
        self,
        replica: Replica,
        given: Tensor,
        *,
        targets: Tensor | None,
        loss_share: int,
        split: bool,
        updates: int,
    ) -> tuple[Tensor, Pass]:
        """A forward like that of `run_stage`, as a graph if there is one.

        Args:
            updates: of the stage, between this forward and its backward.

        Raises:
            RuntimeError: no slot is free.
        """
        slot = self._free.pop() if self._free else None
        if slot is None or slot.is_taken:
            raise RuntimeError("no slot of the stage's CUDA graphs is free for another micro-batch in flight")
        slot.is_taken = True
        buffer = (self._weights.current_buffer + updates) % len(self._weights.gradients)
        graphs = slot.graphs[self._weights.replicas.index(replica), buffer, split]
        slot.given.copy_(given)
        if slot.targets is not None:
            assert targets is not None
            slot.targets.copy_(targets)
        graphs.forward()
        return slot.output.clone(), _ReplayedPass(self, slot, graphs, replica=replica, loss_share=loss_share)

    def free(self, slot: _Slot) -> None:
        """The backward of the micro-batch in `slot` is complete."""
        slot.is_taken = False
        self._free.append(slot)


def updates_until_backward(actions: Sequence[Action]) -> Mapping[tuple[int, int], int]:
    """For each (stage, micro-batch), the updates of the stage between its forward and its backward: they
    change the gradient buffer that the backward adds to."""
    updates: Counter[int] = Counter()
    at_forward: dict[tuple[int, int], int] = {}
    between: dict[tuple[int, int], int] = {}
    for action in actions:
        key = action.stage, action.microbatch
        if action.op is Op.UPDATE:
            updates[action.stage] += 1
        elif action.op is Op.FORWARD:
            at_forward[key] = updates[action.stage]
        elif action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            between[key] = updates[action.stage] - at_forward[key]
    return between
