"""An update on a device: its phases follow each other in the slack of the pipeline.

The real executors, updates, clocks and groups run here; the device, its streams and NCCL's queues are in
virtual time. A forward takes 1 s and a backward 2 s, and the host runs ahead of both.

Each rank's host is a thread of its own, and one of them runs at a time: the one whose clock is behind all
others'. So the answer to a host's query is known when it asks. The work of a device is a graph: every item
ends some seconds after its predecessors, and an exchange starts when all members have launched it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from support.small_runs import ranks_with, small_config
from torch import Tensor, nn

import stages.comm.reduction_rounds
import stages.pipeline.build
import stages.update.update_phases
from schedules import Op, Program
from schedules.actions import Action
from schedules.messages import Message
from stages.comm.collectives import DistributedGroup, Exchange
from stages.comm.communicator import Communicator
from stages.comm.p2p import Links
from stages.comm.reduction_rounds import reduction_plan
from stages.comm.topology import Connection
from stages.config.run_config import RunConfig, changed
from stages.config.segments import segment_program
from stages.model.decoder import RunBlock, Stage
from stages.model.layers import Block
from stages.pipeline.build import Rank
from stages.resolve.facts import facts
from stages.shape.optimizer_sharding import assign_owners
from stages.shape.partition import cut_of, stage_parameters
from stages.update.async_update import needs_update
from stages.update.clock import EventClock
from stages.update.optimizer_step import StageUpdate
from stages.update.update_stream import OneStream

LAUNCH = 0.01
"""Seconds that a host needs to launch one item of work."""


class Work:
    """An item of device work; its end is known once the ends of its predecessors are."""

    def __init__(self, seconds: float = 0.0, *, members: int = 1) -> None:
        self.seconds = seconds
        self.after: list[Work] = []
        self.launched_at = 0.0
        self._missing = members
        self._end: float | None = None

    def launch(self, at: float, after: list[Work]) -> None:
        """Launch at one member."""
        self.after += after
        self.launched_at = max(self.launched_at, at)
        self._missing -= 1

    @property
    def end(self) -> float | None:
        if self._end is None and self._missing == 0:
            ends = [work.end for work in self.after]
            if None not in ends:
                self._end = max([self.launched_at, *(end for end in ends if end is not None)]) + self.seconds
                self.after = []
        return self._end


class World:
    """All hosts and their shared state."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._hosts: list[Device] = []
        self._failures: list[BaseException] = []
        self.running: Device | None = None
        """Device whose host is running."""
        self.messages: dict[Any, Work] = defaultdict(Work)
        self.exchanges: dict[tuple[str, int], Work] = {}

    def run(self, parts: list[tuple[Device, Callable[[], None]]]) -> None:
        """Run the function of every host.

        Raises:
            RuntimeError: all remaining hosts wait for each other.
        """
        self._hosts = [device for device, _ in parts]
        threads = [threading.Thread(target=self._part, args=part, daemon=True) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        if self._failures:
            raise self._failures[0]

    def _part(self, device: Device, part: Callable[[], None]) -> None:
        try:
            self.pause(device)
            part()
        except BaseException as error:
            self._failures.append(error)
        with self._turn:
            device.over = True
            self._turn.notify_all()

    def pause(self, device: Device) -> None:
        """Let the hosts that are behind run, and wait for the awaited work of this one."""
        with self._turn:
            device.paused = True
            self._turn.notify_all()
            while not self._may_go_on(device):
                self._turn.wait(timeout=60)
            device.paused = False
            self.running = device
            if device.awaits is not None:
                assert device.awaits.end is not None
                device.now = max(device.now, device.awaits.end)
                device.awaits = None

    def _may_go_on(self, device: Device) -> bool:
        left = [host for host in self._hosts if not host.over]
        if self._failures:
            raise RuntimeError("another host has failed")
        if not all(host.paused for host in left):
            return False
        able = [host for host in left if host.awaits is None or host.awaits.end is not None]
        if not able:
            raise RuntimeError("all hosts wait for what none has launched")
        return device is min(able, key=lambda host: (host.next_at, host.number))


class Device:
    """One rank's device and host."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.now = 0.0
        """Clock of the host, seconds."""
        self.paused = self.over = False
        self.awaits: Work | None = None
        self.tails: dict[str, Work] = {}
        self.looks = 0
        """Number of times that the host queried an exchange."""
        self.largest_part = 1
        """Largest number of gradient elements that one data rank owns."""
        self.stream = "actions"
        self.action = ""
        """Name of the host's current action."""
        self.done: dict[str, list[Work]] = defaultdict(list)
        """Work launched for each action and update."""

    @property
    def next_at(self) -> float:
        end = None if self.awaits is None else self.awaits.end
        return self.now if end is None else max(self.now, end)

    def launch(self, seconds: float, *, name: str = "") -> Work:
        """Add work to the current stream."""
        self.now += LAUNCH
        work = Work(seconds)
        before = self.tails.get(self.stream)
        work.launch(self.now, [] if before is None else [before])
        self.tails[self.stream] = work
        if name:
            self.done[name].append(work)
        return work

    def wait_for(self, work: Work) -> None:
        """Make the current stream wait for `work`."""
        before = self.tails.get(self.stream)
        barrier = Work()
        barrier.launch(0.0, [work] if before is None else [before, work])
        self.tails[self.stream] = barrier

    def query(self, work: Work) -> bool:
        self.world.pause(self)
        return work.end is not None and work.end <= self.now

    def synchronize(self, work: Work) -> None:
        self.awaits = work
        self.world.pause(self)

    def tail(self) -> Work:
        return self.tails.setdefault(self.stream, _nothing())


def _nothing() -> Work:
    work = Work()
    work.launch(0.0, [])
    return work


class VirtualEvent:
    """Replaces `torch.cuda.Event`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.work = _nothing()

    def record(self) -> None:
        self.work = self._device.launch(0.0)

    def query(self) -> bool:
        return self._device.query(self.work)

    def synchronize(self) -> None:
        self._device.synchronize(self.work)

    def elapsed_time(self, end_event: VirtualEvent) -> float:
        assert self.work.end is not None
        assert end_event.work.end is not None
        return 1000 * (end_event.work.end - self.work.end)


class VirtualStreams:
    """Replaces `CudaStreams`."""

    parallel = True

    def __init__(self, device: Device) -> None:
        self._device = device

    def fork(self) -> None:
        actions = self._device.tail()
        with self.beside():
            self._device.wait_for(actions)

    @contextmanager
    def beside(self) -> Iterator[None]:
        before, self._device.stream = self._device.stream, "updates"
        yield
        self._device.stream = before

    def point(self) -> Work:
        with self.beside():
            return self._device.tail()

    def join(self, point: Work) -> None:
        self._device.wait_for(point)


class VirtualCommunicator:
    """A communicator like NCCL's: one queue, and waiting blocks the stream, not the host."""

    def __init__(self, device: Device, name: str, *, size: int, seconds: Callable[[str, int], float]) -> None:
        self._device = device
        self._name = name
        self._size = size
        self._seconds = seconds
        self._count = 0
        self._coalesced: list[int] | None = None

    def _begin(self, kind: str, entries: int) -> VirtualWork:
        key = self._name, self._count
        self._count += 1
        exchanges = self._device.world.exchanges
        if key not in exchanges:
            exchanges[key] = Work(self._seconds(kind, entries), members=self._size)
        work, queued = exchanges[key], self._device.tail()
        before = self._device.tails.get(self._name)
        work.launch(self._device.now, [queued] if before is None else [queued, before])
        self._device.tails[self._name] = work
        return VirtualWork(self._device, work)

    def allgather(self, outputs: Any, inputs: Any, /) -> VirtualWork:
        for output in outputs[0]:
            output.copy_(inputs[0])
        return self._begin("allgather", inputs[0].numel())

    def broadcast(self, tensor: Any, root: int, /) -> VirtualWork | None:
        if self._coalesced is None:
            return self._begin("broadcast", tensor.numel())
        self._coalesced.append(tensor.numel())
        return None

    def _start_coalescing(self) -> None:
        self._coalesced = []

    def _end_coalescing(self) -> VirtualWork:
        runs, self._coalesced = self._coalesced, None
        return self._begin("broadcasts", sum(runs or ()))

    def alltoall_base(self, output: Any, input_: Any, output_sizes: Any, input_sizes: Any, /) -> VirtualWork:
        output.zero_()
        return self._begin("alltoall", max(input_sizes))


class VirtualWork:
    def __init__(self, device: Device, work: Work) -> None:
        self._device = device
        self._work = work

    def is_completed(self) -> bool:
        self._device.looks += 1
        return self._device.query(self._work)

    def wait(self) -> None:
        self._device.wait_for(self._work)


NUMBERS = 0.01
"""Seconds of an exchange of a few numbers."""
BACKWARD = 2.0


@dataclass(frozen=True)
class Chain:
    """What the phases of an update take, seconds."""

    reduction: float = 0.0
    step: float = 0.0
    spread: float = 0.0


class VirtualLinks:
    """Links whose messages arrive when they are sent."""

    waits = True
    waited_for = None
    most_message_bytes = 0

    def __init__(self, device: Device, shape: tuple[int, ...]) -> None:
        self._device = device
        self._shape = shape

    def begin(self, program: Program) -> None:
        pass

    def passed(self, moment: int) -> None:
        pass

    def send(self, message: Message, tensor: Tensor) -> None:
        self._device.world.messages[message].launch(self._device.now, [self._device.tail()])

    def send_all(self, messages: Sequence[Message], tensor: Tensor) -> None:
        for message in messages:
            self.send(message, tensor)

    def receive(self, message: Message) -> Tensor:
        self._device.wait_for(self._device.world.messages[message])
        return torch.zeros(self._shape)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, device: Device, layers: int) -> Tensor:
        ctx.device, ctx.layers = device, layers
        device.launch(1.0 / layers, name=device.action)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.device.launch(BACKWARD / ctx.layers, name=ctx.device.action)
        return gradient * 1.0, None, None


def timed_blocks(rank: Rank, device: Device) -> None:
    """Let every block of a rank take its time on the device."""
    executor: Any = rank.executor

    def acting(act: Callable[[Action], Iterator[None]]) -> Callable[[Action], Iterator[None]]:
        def perform(action: Action) -> Iterator[None]:
            device.action = str(action)
            yield from act(action)

        return perform

    executor._forward, executor._backward = acting(executor._forward), acting(executor._backward)
    for state in rank.stages.values():
        for replica in state.weights.replicas:
            replica.module.run_block = timed_block(replica.module, device)


def timed_block(module: Stage, device: Device) -> RunBlock:
    run, layers = module.run_block, len(module.blocks)

    def run_block(block: nn.Module, x: Tensor, rotation: Tensor | None) -> Tensor:
        timed = _Layer.apply(x, device, layers)  # type: ignore[no-untyped-call]
        return run(cast(Block, block), timed, rotation)

    return run_block


def to_host(world: World, numbers: Tensor) -> Exchange[list[float]]:
    assert world.running is not None
    copied = VirtualEvent(world.running)
    copied.record()
    return Exchange(ready=copied.query, wait=copied.synchronize, take=numbers.tolist)


def played(
    config: RunConfig, chain: Chain, monkeypatch: pytest.MonkeyPatch, *, one_stream: bool = False
) -> tuple[Program, list[dict[str, tuple[float, float]]]]:
    """When each rank's device began and ended every action and update.

    `one_stream`: with updates in the stream of the actions, each phase launched when the host next looks.
    """
    program = segment_program(config, first_step=0, steps=config.train.steps)
    world = World()
    devices = [Device(world, rank) for rank in range(program.num_ranks)]
    apply = StageUpdate.apply

    def timed_apply(self: StageUpdate, *args: Any, **kwargs: Any) -> Any:
        assert world.running is not None
        world.running.launch(chain.step, name=f"U{kwargs['version']}")
        return apply(self, *args, **kwargs)

    def group(device: Device, name: str, rank: int, *, size: int, members: int) -> DistributedGroup:
        def seconds(kind: str, entries: int) -> float:
            whole = device.largest_part
            return {
                "allgather": NUMBERS,
                "alltoall": chain.reduction * entries / whole,
                "broadcast": chain.spread / size,
                "broadcasts": chain.spread,
            }[kind]

        communicator = VirtualCommunicator(device, name, size=members, seconds=seconds)
        return DistributedGroup(
            cast(Communicator, communicator), rank=rank, size=size, device_waits=not one_stream
        )

    ranks = []
    with monkeypatch.context() as patch:
        patch.setattr(StageUpdate, "apply", timed_apply)
        patch.setattr(stages.update.update_phases, "to_host", lambda numbers: to_host(world, numbers))
        patch.setattr(stages.comm.reduction_rounds, "LEAST_PIECE", 1)
        for number, device in enumerate(devices):
            clock = EventClock(lambda device=device: VirtualEvent(device))  # type: ignore[misc]
            streams = OneStream() if one_stream else VirtualStreams(device)
            patch.setattr(stages.pipeline.build, "clock_of", lambda _, clock=clock: clock)
            patch.setattr(stages.pipeline.build, "streams_of", lambda _, streams=streams: streams)
            connection = Connection(
                rank=number,
                links=cast(Links, VirtualLinks(device, facts(config).activation_shape)),
                pipeline=group(device, "pipeline", number, size=len(devices), members=len(devices)),
                # The other data rank does the same at the same times.
                data=group(device, f"data {number}", 0, size=2, members=1),
            )
            (rank,) = ranks_with(config, [connection])
            (state,) = rank.stages.values()
            with state.weights.receiving_initial():
                pass  # the other data rank's weights are of no interest
            device.largest_part = max(state.weights.reduction.parts)
            timed_blocks(rank, device)
            ranks.append(rank)

        def run(rank: Rank) -> None:
            for _ in rank.executor.run(program):
                raise AssertionError("a host that waits by itself does not yield")

        world.run(
            [(device, lambda rank=rank: run(rank)) for device, rank in zip(devices, ranks, strict=True)]  # type: ignore[misc]
        )
    # But for the verdict no phase of an update is held up until a host looks.
    assert all((device.looks > 0) == one_stream for device in devices)
    return program, [
        {
            name: (min((w.end or 0.0) - w.seconds for w in works), max(w.end or 0.0 for w in works))
            for name, works in device.done.items()
        }
        for device in devices
    ]


Times = list[dict[str, tuple[float, float]]]


def finished(times: Times) -> float:
    """When the last action of any rank ended."""
    return max(end for of_rank in times for name, (_, end) in of_rank.items() if not name.startswith("U"))


def least_slack(program: Program, times: Times) -> float:
    """Seconds between the last rank's last backward of an update and the first action that needs it."""
    least = float("inf")
    for version in range(1, program.steps + 1):
        begun, needed = 0.0, float("inf")
        for actions, of_rank in zip(program.actions, times, strict=True):
            at = next(i for i, a in enumerate(actions) if a.op is Op.UPDATE and a.version == version)
            begun = max(begun, of_rank[str(actions[at - 1])][1])
            stages_here = {action.stage for action in actions}
            for before, action in pairwise(actions[at:]):
                if needs_update(action, stages=stages_here, version=version):
                    # One update at a time: the next one, which begins when the action before ends, needs it.
                    next_update = action.op is Op.UPDATE
                    needed = min(needed, of_rank[str(before)][1] if next_update else of_rank[str(action)][0])
                    break
        least = min(least, needed - begun)
    return least


def chain_of(seconds: float) -> Chain:
    return Chain(reduction=0.5 * seconds, step=0.25 * seconds, spread=0.25 * seconds)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "options"),
    [(2, 4, {}), (3, 6, {}), (4, 4, {}), (4, 8, {}), (4, 8, {"delay": 2}), (2, 8, {"ahead": 2})],
)
def test_a_chain_hides_wherever_there_is_slack(
    ranks: int, microbatches: int, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the one look that the host takes: it comes to it when the action under way ends."""
    config = small_config(
        "2bw",
        stages=ranks,
        layers=ranks,
        data=2,
        microbatches=microbatches,
        steps=3 if options.get("delay", 1) == 1 else 4,
        eval_interval=9,
        **options,
    )
    program, times = played(config, Chain(), monkeypatch)
    slack = least_slack(program, times)
    look = BACKWARD
    assert slack > look
    _, with_chain = played(config, chain_of(slack - look), monkeypatch)
    assert finished(with_chain) == pytest.approx(finished(times), abs=0.5)
    _, in_one_stream = played(config, chain_of(slack - look), monkeypatch, one_stream=True)
    assert finished(in_one_stream) > finished(times) + 2.0


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_a_fifth_of_a_step_of_exchanges_costs_2bw_nothing_and_1f1b_what_no_backward_hides(
    ranks: int, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients, as float32, take two thirds of it, the new weights, in bfloat16, one."""
    steps, fifth = 3, 0.2 * microbatches * (1 + BACKWARD)
    exchanges = Chain(reduction=2 / 3 * fifth, spread=fifth / 3)
    lost = {}
    for schedule in ("2bw", "1f1b"):
        config = small_config(schedule, stages=ranks, layers=ranks, data=2,
            microbatches=microbatches, steps=steps, eval_interval=9)  # fmt: skip
        ends = [finished(played(config, chain, monkeypatch)[1]) for chain in (Chain(), exchanges)]
        lost[schedule] = (ends[1] - ends[0]) / (steps - 1)
    assert lost["2bw"] == pytest.approx(0, abs=0.25)
    # The new weights, and of the gradients what the last backward has no time for.
    assert lost["1f1b"] >= exchanges.spread + max(0.0, exchanges.reduction - BACKWARD)
    assert lost["1f1b"] <= fifth


@pytest.mark.slow
def test_a_flush_loses_what_cannot_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `left_to_hide` in benchmarks/sleeping_stage.py has it; but the embedding is whole last, and so large
    that it takes longer than a layer would."""
    layers, steps = 8, 3
    config = small_config("1f1b", layers=2 * layers, data=2, steps=steps, eval_interval=9)
    config = changed(config, {"model.width": 48, "model.mlp_width": 80})
    with monkeypatch.context() as patch:
        patch.setattr(stages.comm.reduction_rounds, "LEAST_PIECE", 1)
        parameters = stage_parameters(config.model, cut_of(config)[0])
        sizes = [parameter.size for parameter in parameters]
        ownership = assign_owners([parameter.shape for parameter in parameters], data_ranks=2)
        plan = reduction_plan(sizes, ownership, number_bytes=4)
        ends = [one for one in plan.early_rounds if one.needs == len(sizes)]
    largest = [max(end - start for runs in one.pieces for start, end in runs) for one in ends]
    last = sum(largest) / max(plan.parts)
    assert last < 0.3
    _, times = played(config, Chain(), monkeypatch)
    for seconds in (1.0, 4.0):
        _, slow = played(config, Chain(reduction=seconds), monkeypatch)
        lost = (finished(slow) - finished(times)) / (steps - 1)
        least = max(seconds * last, seconds - BACKWARD * (1 - 1 / layers))
        # A round under the backward is three quarters full at least, so the network may be that much behind.
        assert least - 0.1 <= lost <= least + 0.1 * seconds
