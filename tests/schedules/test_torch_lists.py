"""Our programs compared with those of torch.distributed.pipelining, and written in torch's CSV form."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from schedules import Op, ScheduleError, build
from schedules.io.torch_lists import to_csv

GEOMETRIES = [(1, 1), (1, 5), (2, 2), (2, 7), (3, 8), (4, 4), (4, 10), (5, 20), (8, 16), (7, 64)]


def computations(program):
    """For each rank, one step's actions as torch prints them."""
    return [
        [f"{action.stage}{action.op}{action.microbatch}" for action in actions if action.op is not Op.UPDATE]
        for actions in program.actions
    ]


def outlines_of(*, stages, chunks=1, rank=0):
    """What torch's schedules ask of the stages of a rank."""
    return [
        SimpleNamespace(
            stage_index=chunk * stages + rank,
            num_stages=stages * chunks,
            group_rank=rank,
            group_size=stages,
            group=None,
            submod=None,
            has_backward=True,
            device="cpu",
            is_first=chunk * stages + rank == 0,
            is_last=chunk * stages + rank == stages * chunks - 1,
        )
        for chunk in range(chunks)
    ]


def torch_lists(schedule_class, *, stages, microbatches, chunks=1):
    """What the class says that each rank does, without waits and movements, and pairs one by one."""
    outlines = outlines_of(stages=stages, chunks=chunks)
    single = issubclass(schedule_class, torch_schedules.PipelineScheduleSingle)
    lists = schedule_class(outlines[0] if single else outlines, microbatches).pipeline_order
    return [computed(lists[rank]) for rank in range(stages)]


def computed(actions):
    """The computations of one of torch's lists, as they print."""
    return [str(part) for part in parts(actions) if part.computation_type.value in tuple("FBIW")]


def parts(actions):
    """The actions of a list, without those that are None, and pairs one by one."""
    for action in actions:
        if action is not None:
            yield from action.sub_actions or (action,)


@pytest.mark.parametrize(("p", "m"), [*GEOMETRIES, (4, 3)])
@pytest.mark.parametrize(
    ("name", "schedule_class", "v"),
    [
        ("gpipe", torch_schedules.ScheduleGPipe, 1),
        ("zero-bubble", torch_schedules.ScheduleInterleavedZeroBubble, 1),
        *(("interleaved-1f1b", torch_schedules.ScheduleInterleaved1F1B, v) for v in (2, 3, 4)),
        ("zb-v", torch_schedules.ScheduleZBVZeroBubble, 2),
        ("dualpipe-v", torch_schedules.ScheduleDualPipeV, 2),
        ("looped-bfs", torch_schedules.ScheduleLoopedBFS, 2),
    ],
)
def test_schedules_are_torchs(name, schedule_class, v, p, m):
    if name == "dualpipe-v":
        m += 2 * p
    elif name in ("zero-bubble", "interleaved-1f1b") and m % max(1, m // p):
        m -= m % p
    theirs = torch_lists(schedule_class, stages=p, microbatches=m, chunks=v)
    assert computations(build(name, stages=p, microbatches=m, steps=1, chunks=v)) == theirs


@pytest.mark.parametrize(("p", "m"), GEOMETRIES)
def test_1f1b_is_what_torchs_class_performs(p, m):
    ours = computations(build("1f1b", stages=p, microbatches=m, steps=1))
    for stage in range(p):
        performed = []
        recorder = SimpleNamespace(
            stage_index=stage,
            num_stages=p,
            is_first=stage == 0,
            is_last=stage == p - 1,
            has_backward=True,
            get_fwd_recv_ops=lambda i: [],
            get_fwd_send_ops=lambda i: [],
            get_bwd_recv_ops=lambda i: [],
            get_bwd_send_ops=lambda i: [],
            forward_one_chunk=lambda i, *a, at=stage, to=performed, **k: to.append(f"{at}F{i}"),
            backward_one_chunk=lambda i, *a, at=stage, to=performed, **k: to.append(f"{at}B{i}"),
            perform_reduce_grad=lambda scale: None,
            release_fwd_send_outputs=lambda *a: None,  # from torch 2.15 on
        )
        schedule = torch_schedules.Schedule1F1B(recorder, m)
        schedule._initialize_stage = lambda *a, **k: None
        schedule._step_microbatches([()] * m, [{}] * m)
        assert performed == ours[stage]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble"])
def test_torch_reads_what_we_write(name, tmp_path):
    chunks = 2 if name == "interleaved-1f1b" else 1
    program = build(name, stages=3, microbatches=6, steps=2, first_step=4, chunks=chunks)
    file = tmp_path / "schedule.csv"
    file.write_text(to_csv(program), encoding="utf-8")
    schedule = torch_schedules._PipelineScheduleRuntime(outlines_of(stages=3, chunks=chunks), 6)
    schedule.pipeline_order = {}
    schedule._load_csv(str(file))
    read = [[str(action) for action in schedule.pipeline_order[rank]] for rank in range(3)]
    assert read == computations(build(name, stages=3, microbatches=6, steps=1, chunks=chunks))
    sends = [str(a) for a in schedule.pipeline_order_with_comms[0] if "SEND_F" in str(a)]
    assert sends[:2] == ["0SEND_F0", "0SEND_F1"]


def test_only_synchronous_programs_are_written_as_csv():
    for name in ("2bw", "pipedream", "paci"):
        with pytest.raises(ScheduleError, match=f"{name} is none: 0F"):
            to_csv(build(name, stages=3, microbatches=4, steps=2))
