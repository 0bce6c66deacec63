"""What a schedule declares is what its programs show; what cannot be built is refused with what could."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import schedules
from schedules import FAMILY, NAMES, ScheduleError, analyze, build, is_synchronous, smallest_delay


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"name": "1f2b"},
            "unknown schedule '1f2b'; did you mean 1f1b? accepted: gpipe, 1f1b, interleaved-1f1b, ",
        ),
        ({"stages": 0}, "stages is 0; accepted: 1 or more"),
        ({"microbatches": 0}, "microbatches is 0; accepted: 1 or more"),
        ({"steps": 0}, "steps is 0; accepted: 1 or more"),
        ({"first_step": -1}, "first_step is -1; accepted: 0 or more"),
        ({"chunks": 0}, "chunks is 0; accepted: 1 or more"),
        (
            {"chunks": 2},
            "1f1b does not take chunks, and 2 is asked for; taken by interleaved-1f1b, looped-bfs",
        ),
        ({"delay": 1}, "1f1b does not take delay, and 1 is asked for; taken by 2bw"),
        ({"ahead": 2}, "1f1b does not take ahead, and 2 is asked for; taken by 2bw"),
        (
            {"name": "zb-v", "chunks": 3},
            "zb-v does not take chunks, and 3 is asked for; taken by interleaved-1f1b, looped-bfs",
        ),
        (
            {"name": "dualpipe-v"},
            "dualpipe-v with 8 stages needs at least as many micro-batches per step, and 4 are asked for",
        ),
        ({"name": "2bw", "ahead": 0}, "ahead is 0; accepted: 1 or more"),
        (
            {"name": "2bw", "ahead": 2, "delay": 1},
            "2bw on 4 ranks with 4 micro-batches per step needs a delay of at least 2, and 1 is asked for",
        ),
        ({"name": "2bw", "delay": 0}, "delay is 0; accepted: 1 or more"),
        ({"name": "2bw", "update_interval": 1}, "2bw does not take update_interval, and 1 is asked for"),
        (
            {"name": "paci", "update_interval": 3},
            "an update interval of 3 does not divide the 4 micro-batches",
        ),
        (
            {"name": "interleaved-1f1b", "microbatches": 9, "chunks": 2},
            "9 micro-batches on 4 ranks do not divide into 2 of them; accepted: a multiple of 4",
        ),
    ],
)
def test_bad_arguments(asked, message):
    with pytest.raises(ScheduleError) as caught:
        build(**{"name": "1f1b", "stages": 4, "microbatches": 4, "steps": 1} | asked)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_word_that_is_no_option_is_refused():
    with pytest.raises(TypeError, match="no option of schedules: dealy; accepted: delay, "):
        build("2bw", stages=4, microbatches=4, steps=1, dealy=2)
    with pytest.raises(TypeError, match="no option of schedules: ahed"):
        smallest_delay("2bw", stages=4, microbatches=2, ahed=2)


def test_synchronous_schedules_are_known_by_name():
    assert is_synchronous("zero-bubble")
    assert not is_synchronous("paci")
    with pytest.raises(ScheduleError, match="accepted: gpipe"):
        is_synchronous("zb")


def test_an_interval_of_all_microbatches_may_be_spelled_out():
    assert build("1f1b", stages=2, microbatches=4, steps=1, update_interval=4).update_interval == 4


STAGES, MICROBATCHES = 3, 6


@pytest.mark.parametrize("name", NAMES)
def test_declared_facts_are_those_of_the_program(name: str) -> None:
    schedule = FAMILY[name]
    program = build(name, stages=STAGES, microbatches=MICROBATCHES, steps=3)
    assert analyze(program).synchronous == schedule.synchronous
    assert program.updates_together == schedule.updates_together
    assert ("update_interval" in schedule.options) == (not schedule.updates_together)
    assert program.num_stages == STAGES * schedule.stages_per_rank
    default = schedule.default_interval or (lambda microbatches: microbatches)
    assert program.update_interval == default(MICROBATCHES)
    assert ("delay" in schedule.options) == (schedule.lead is not None)


@pytest.mark.parametrize("name", NAMES)
def test_bounded_activations_do_not_grow_with_the_microbatches(name: str) -> None:
    few, many = (
        analyze(build(name, stages=STAGES, microbatches=count, steps=3)).rank_activations
        for count in (2 * STAGES, 4 * STAGES)
    )
    assert (few == many) == FAMILY[name].bounded_activations


@pytest.mark.parametrize(("name", "split"), [("zero-bubble", True), ("zb-v", True), ("1f1b", False)])
def test_a_program_knows_whether_it_splits_backwards(name: str, split: bool) -> None:
    assert build(name, stages=2, microbatches=4, steps=1).split_backward == split


def test_no_module_imports_torch_numpy_matplotlib_or_another_package_of_ours():
    modules = [module.name for module in pkgutil.walk_packages(schedules.__path__, "schedules.")]
    assert "schedules.io.torch_lists" in modules
    code = (
        f"import sys, {', '.join(modules)}\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'stages', 'optimizers', 'asyncpp_cli'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
