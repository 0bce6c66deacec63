"""Our programs compared with those of torch.distributed.pipelining, and torch's CSV form both ways."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from schedules import Op, ScheduleError, analyze, build, verify
from schedules.costs import uniform_costs
from schedules.io.torch_lists import from_csv, from_lists, from_torch, to_csv
from schedules.messages import sent_between_ranks
from schedules.simulate import simulate, steps_to_measure, throughput

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
    """What the class says that each rank does, waits left out."""
    outlines = outlines_of(stages=stages, chunks=chunks)
    single = issubclass(schedule_class, torch_schedules.PipelineScheduleSingle)
    lists = schedule_class(outlines[0] if single else outlines, microbatches).pipeline_order
    return [
        [str(action) for action in lists[rank] if action is not None and "REDUCE" not in str(action)]
        for rank in range(stages)
    ]


@pytest.mark.parametrize(("p", "m"), [*GEOMETRIES, (4, 3)])
@pytest.mark.parametrize(
    ("name", "schedule_class", "v"),
    [
        ("gpipe", torch_schedules.ScheduleGPipe, 1),
        ("zero-bubble", torch_schedules.ScheduleInterleavedZeroBubble, 1),
        *(("interleaved-1f1b", torch_schedules.ScheduleInterleaved1F1B, v) for v in (2, 3, 4)),
    ],
)
def test_one_stage_after_another_is_torchs(name, schedule_class, v, p, m):
    if m % max(1, m // p):
        m -= m % p
    theirs = torch_lists(schedule_class, stages=p, microbatches=m, chunks=v)
    assert computations(build(name, stages=p, microbatches=m, steps=1, chunks=v)) == theirs


@pytest.mark.parametrize(("p", "m"), [*GEOMETRIES, (4, 3)])
@pytest.mark.parametrize(
    ("name", "schedule_class"),
    [
        ("zb-v", torch_schedules.ScheduleZBVZeroBubble),
        ("dualpipe-v", torch_schedules.ScheduleDualPipeV),
        ("looped-bfs", torch_schedules.ScheduleLoopedBFS),
    ],
)
def test_schedules_of_two_stages_per_rank_equal_torchs(name, schedule_class, p, m):
    m += 2 * p if name == "dualpipe-v" else 0
    theirs = from_torch(schedule_class.__name__, stages=p, microbatches=m, chunks=2, steps=2)
    ours = build(name, stages=p, microbatches=m, steps=2, chunks=2)
    assert ours.actions == theirs.actions
    assert ours.rank_of_stage == theirs.rank_of_stage


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


def test_the_list_that_torch_shows_for_1f1b_is_off_by_one_on_the_last_rank():
    # Schedule1F1B._get_pipeline_order counts the forwards of its steady phase on from the last one of the
    # warm-up, and the last rank has no warm-up: it begins with micro-batch 1. The class does not perform that
    # list (see above).
    ours = computations(build("1f1b", stages=3, microbatches=4, steps=1))
    shown = torch_lists(torch_schedules.Schedule1F1B, stages=3, microbatches=4)
    assert shown[:2] == ours[:2]
    assert ours[2] == ["2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "2F3", "2B3"]
    assert shown[2] == ["2F1", "2B0", "2F2", "2B1", "2F3", "2B2", "2F4", "2B3"]
    assert from_torch("1F1B", stages=3, microbatches=4, chunks=1, steps=1).actions == (
        build("1f1b", stages=3, microbatches=4, steps=1).actions
    )


def test_torch_interleaves_one_chunk_with_twice_the_warmup():
    # The distance to the last rank counts twice where a rank has several chunks; with one, once is enough,
    # and ours holds fewer activations for the same bubble.
    theirs = from_torch("Interleaved1F1B", stages=4, microbatches=8, chunks=1, steps=6)
    ours = build("interleaved-1f1b", stages=4, microbatches=8, chunks=1, steps=6)
    assert [word[1] for word in computations(theirs)[0][:8]] == ["F"] * 7 + ["B"]
    assert [word[1] for word in computations(ours)[0][:5]] == ["F"] * 4 + ["B"]
    bubbles = [throughput(simulate(program, uniform_costs(program))).bubble for program in (theirs, ours)]
    assert bubbles[0] == bubbles[1]


def test_torch_refuses_fewer_microbatches_than_stages_for_1f1b_and_we_do_not():
    with pytest.raises(ScheduleError, match=r"torch-1F1B: Number of microbatches \(2\)"):
        from_torch("1F1B", stages=3, microbatches=2, chunks=1, steps=1)
    verify(build("1f1b", stages=3, microbatches=2, steps=1))


@pytest.mark.parametrize(
    ("name", "chunks", "bubble"),
    [
        ("GPipe", 1, 3 / 11),
        ("Schedule1F1B", 1, 3 / 11),
        ("Interleaved1F1B", 2, 3 / 19),
        ("LoopedBFS", 2, 3 / 19),
        ("InterleavedZeroBubble", 1, 1 / 9),
        ("InterleavedZeroBubble", 2, 1 / 17),
        ("ZBVZeroBubble", 2, 1 / 17),  # the wait for the norm of all stages
        ("DualPipeV", 2, None),
    ],
)
def test_every_schedule_of_torch_becomes_a_program(name, chunks, bubble):
    steps = steps_to_measure(stages=4 * chunks, microbatches=8)
    program = from_torch(name, stages=4, microbatches=8, chunks=chunks, steps=steps)
    verify(program)
    assert from_csv(to_csv(program), name=program.schedule, steps=steps) == program
    measured = throughput(simulate(program, uniform_costs(program, input_half=1.0, weight_half=1.0)))
    if bubble is not None:
        assert measured.bubble == pytest.approx(bubble)


def test_v_shaped_placement_comes_with_the_schedule():
    program = from_torch("ZBVZeroBubble", stages=4, microbatches=8, chunks=2, steps=1)
    assert program.rank_of_stage == (0, 1, 2, 3, 3, 2, 1, 0)


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


RIGHT = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


def test_movements_waits_and_pairs_are_understood():
    program = from_csv(
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0REDUCE_GRAD,"
        "0WAIT_REDUCE_GRAD\n,1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,1WAIT_SEND_B0\n",
        name="x",
        steps=1,
    )
    assert computations(program) == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    assert str(program.actions[1][-1]) == "1U1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RIGHT.replace("0B1", ""), "x, row 1 (rank 0): 0B1 is missing"),
        (RIGHT.replace("1F1", ""), "x, row 2 (rank 1): 1F1 is missing"),
        (RIGHT.replace("0B1", "0B0"), "x, row 1 (rank 0), cell 5: 0B0 stands here and in cell 4"),
        (RIGHT.replace("1B0", "0B7"), "x: stage 0 is on rank 0 and on rank 1"),
        (
            RIGHT.replace("1F", "2F").replace("1B", "2B"),
            "x: no rank performs stage 1, but there is a stage 2",
        ),
        (RIGHT.replace("1B0", "1C0"), "x, row 2 (rank 1), cell 3: '1C0' is not an action"),
        (RIGHT.replace("1F0,1B0", "1B0,1F0"), "x: 1B0@0: micro-batch 0 has no forward before this backward"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "x: deadlock: rank 0 waits at 0B0@0"),
        ("", "x: has no action"),
        (",,\n", "x: has no action"),
        (RIGHT.replace("1B0", "1B" + "9" * 5000), "is not an action"),
        ("0F0," + "x" * 200_000, "x: is not CSV (field larger than field limit"),
    ],
)
def test_a_faulty_list_is_refused_by_its_place(text, message):
    from_csv(RIGHT, name="x", steps=1)
    with pytest.raises(ScheduleError) as caught:
        from_csv(text, name="x", steps=1)
    assert message in str(caught.value)


def test_only_synchronous_programs_are_written_as_csv():
    for name in ("2bw", "pipedream", "paci"):
        with pytest.raises(ScheduleError, match=f"{name} is none: 0F"):
            to_csv(build(name, stages=3, microbatches=4, steps=2))


def test_an_unknown_class_is_refused():
    with pytest.raises(ScheduleError, match="Unknown schedule name 'ZBX'"):
        from_torch("ZBX", stages=2, microbatches=2, chunks=1, steps=1)
    with pytest.raises(ScheduleError, match="torch-ZBVZeroBubble: ZBV requires exactly 2 stages per rank"):
        from_torch("ZBVZeroBubble", stages=2, microbatches=4, chunks=1, steps=1)


def test_a_torch_whose_lists_are_unknown_is_named(monkeypatch):
    class Changed(torch_schedules.PipelineScheduleSingle):
        def __init__(self, outline, microbatches):
            self.pipeline_order = {0: ["0F0", "0FOLD0", "0B0"]}

        _step_microbatches = None

    def missing(name):
        raise AttributeError("no attribute 'group_rank'")

    for found, problem in ((lambda name: Changed, "'0FOLD0' is not an action"), (missing, "group_rank")):
        monkeypatch.setattr(torch_schedules, "get_schedule_class", found)
        with pytest.raises(ScheduleError, match=rf"torch-GPipe: torch .* cannot read: .*{problem}"):
            from_torch("GPipe", stages=1, microbatches=1, chunks=1, steps=1)


# torch 2.15 is the first that waits for sends in its lists and that analyzes the lives of activations.
liveness = pytest.mark.skipif(
    not hasattr(torch_schedules, "analyze_pipeline_activation_liveness"), reason="needs torch 2.15"
)

TORCHS = {
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""Those that torch runs by a list. It runs 1F1B by loops, so ours is lowered instead."""

LOWERED = [(p, m * p) for p in (2, 4, 8) for m in (1, 2, 4)]
CASES = [
    (name, p, m)
    for name in ("1f1b", *TORCHS)
    for p, m in LOWERED
    if name != "dualpipe-v" or m >= 2 * p  # torch refuses fewer
]


def both(name, p, m):
    """Our program of a step, and torch's schedule with its lowered lists."""
    chunks = 1 if name == "1f1b" else 2
    ours = build(name, stages=p, microbatches=m, steps=1, chunks=chunks)
    outlines = outlines_of(stages=p, chunks=chunks)
    if name in TORCHS:
        theirs = getattr(torch_schedules, TORCHS[name])(outlines, m)
        if not hasattr(theirs, "pipeline_order_with_comms"):
            pytest.skip("this torch does not lower the list itself")
        return ours, theirs
    theirs = torch_schedules._PipelineScheduleRuntime(outlines, m)
    rows = [row.split(",") for row in to_csv(ours).splitlines()]
    actions = [[torch_schedules._Action.from_str(cell) for cell in row] for row in rows]
    theirs._prepare_schedule_with_comms(dict(enumerate(actions)))
    return ours, theirs


def parts(actions):
    """The actions of a list, without those that are None, and pairs one by one."""
    for action in actions:
        if action is not None:
            yield from action.sub_actions or (action,)


@pytest.mark.parametrize(("name", "p", "m"), CASES)
def test_lowered_lists_are_read_as_our_programs(name, p, m):
    ours, theirs = both(name, p, m)
    lists = theirs.pipeline_order_with_comms
    read = from_lists([lists[rank] for rank in range(p)], name=name, steps=1)
    assert read.actions == ours.actions
    assert read.rank_of_stage == ours.rank_of_stage
    kinds = {str(action.computation_type.value) for actions in lists.values() for action in parts(actions)}
    if hasattr(torch_schedules, "WAIT_SEND_F"):
        assert {"SEND_F", "WAIT_SEND_F", "RECV_B", "WAIT_SEND_B"} <= kinds


@pytest.mark.parametrize(("name", "p", "m"), CASES)
def test_messages_of_a_pair_of_ranks_are_posted_in_torchs_order(name, p, m):
    """On each directed edge of ranks, which has a communicator of its own with `pipeline_per_edge_p2p`."""
    ours, theirs = both(name, p, m)
    sends = {}
    receives = {}
    for rank, actions in theirs.pipeline_order_with_comms.items():
        for action in parts(actions):
            kind, stage = action.computation_type.value, action.stage_index
            other = stage + (1 if kind in ("SEND_F", "RECV_B") else -1)
            if kind in ("SEND_F", "SEND_B"):
                pair = rank, ours.rank_of_stage[other]
                sends.setdefault(pair, []).append((stage, other, action.microbatch_index))
            elif kind in ("RECV_F", "RECV_B"):
                pair = ours.rank_of_stage[other], rank
                receives.setdefault(pair, []).append((other, stage, action.microbatch_index))
    assert sends == {
        pair: [(each.source, each.destination, each.microbatch) for each in found]
        for pair, found in sent_between_ranks(ours).items()
    }
    assert receives == sends


@liveness
@pytest.mark.parametrize(("name", "p", "m"), CASES)
def test_activations_in_flight_are_torchs_slots(name, p, m):
    ours, theirs = both(name, p, m)
    analysis = analyze(ours)
    for rank in range(p):
        stages = [stage for stage, holder in enumerate(ours.rank_of_stage) if holder == rank]

        def slots(stages, rank=rank):
            found = torch_schedules.analyze_pipeline_activation_liveness(
                theirs, pp_rank=rank, stage_indices=stages, granularity="stage_microbatch"
            )
            return int(found.num_slots)

        assert slots(stages) == analysis.rank_activations[rank]
        for stage in stages:
            assert slots([stage]) == analysis.activations[stage]


@pytest.mark.parametrize(("name", "p", "m"), CASES)
def test_activations_in_flight_are_lifetimes_in_torchs_lists(name, p, m):
    """By the definition of torch 2.15's analysis, for any torch: an activation lives from the position of its
    forward to that of its backward or weight half, both included; actions of a pair have one position."""
    ours = build(name, stages=p, microbatches=m, steps=1, chunks=1 if name == "1f1b" else 2)
    if name in TORCHS:
        lists = getattr(torch_schedules, TORCHS[name])(outlines_of(stages=p, chunks=2), m).pipeline_order
    else:
        rows = [row.split(",") for row in to_csv(ours).splitlines()]
        lists = {rank: map(torch_schedules._Action.from_str, row) for rank, row in enumerate(rows)}
    analysis = analyze(ours)
    for rank in range(p):
        positions = {}
        for position, action in enumerate(action for action in lists[rank] if action is not None):
            for part in parts([action]):
                if str(part.computation_type.value) in "FBIW":
                    key = part.stage_index, part.microbatch_index
                    positions.setdefault(key, []).append(position)
        lives = {key: (min(at), max(at)) for key, at in positions.items()}

        def most(stages, lives=lives):
            own = [life for (stage, _), life in lives.items() if stage in stages]
            return max(sum(start <= at <= end for start, end in own) for at, _ in own)

        stages = [stage for stage, holder in enumerate(ours.rank_of_stage) if holder == rank]
        assert len(lives) == m * len(stages)
        assert most(stages) == analysis.rank_activations[rank]
        for stage in stages:
            assert most([stage]) == analysis.activations[stage]
