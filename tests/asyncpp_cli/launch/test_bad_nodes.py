"""Which failures are a node's, and which nodes are left out for it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.edited import edit

from asyncpp_cli.launch import bad_nodes
from asyncpp_cli.launch.submission.arrays import JobShape, site_settings_of
from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.runs.attempts.settle import end_rank
from asyncpp_cli.runs.experiment_folder import Experiment
from asyncpp_cli.runs.processes import this_process
from asyncpp_cli.runs.run_folder import Run
from asyncpp_cli.sites.profile import find_site

FAULTS = [
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu.",
    "CUDA initialization: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "RuntimeError: No CUDA GPUs are available; no CUDA-capable device is detected",
    "RuntimeError: site.device is cuda, but torch finds no GPU here; accepted: auto, cpu",
    "Failed to initialize NVML: Driver/library version mismatch",
    "Unable to determine the device handle for GPU 0000:C1:00.0: GPU is lost. Reboot the system to recover",
]
RUNS_OWN = [
    "RuntimeError: CUDA error: device-side assert triggered",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "ValueError: loss is not finite",
    "ConnectionError: rank 1 is gone",
    "RuntimeError: site.device is cuda, but this torch is built without CUDA; accepted: auto, cpu",
]


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    return Experiment(folder=tmp_path, name="e", template="", cells=())


def failed(run: Run, message: str, *, in_log: bool) -> Attempt:
    attempt = claim(run, processes=2, replay=False, steps=5)
    assert attempt is not None
    for rank in (0, 1):
        attempt.record_start(rank, this_process(), node=f"n{rank + 1}")
    if in_log:
        run.log_file(attempt=attempt.number, rank=1).write_text(f"{message}\nterminate called\n")
    else:
        attempt.record_error(1, RuntimeError(message))
    end_rank(attempt, 1, code=1, signal_number=None, stopped=False)
    end_rank(attempt, 0, code=1, signal_number=None, stopped=True)
    return attempt


@pytest.mark.parametrize("in_log", [False, True])
@pytest.mark.parametrize("message", [*FAULTS, *RUNS_OWN])
def test_an_error_of_gpu_or_driver_is_the_nodes(experiment: Experiment, message: str, in_log: bool) -> None:
    fault = bad_nodes.node_fault(failed(Run(experiment.folder / "runs" / "a"), message, in_log=in_log))
    if message in RUNS_OWN:
        assert fault is None
    else:
        assert fault is not None
        node, reason = fault
        assert (node, message in reason) == ("n2", True)


@pytest.mark.parametrize(("gpus", "device"), [(4, "cuda"), (0, None)])
def test_a_job_that_was_given_gpus_does_not_train_on_cpus_where_they_fail(
    gpus: int, device: str | None
) -> None:
    site = replace(find_site("testcluster"), run={"threads": 2})
    shape = JobShape(nodes=1, tasks=4, tasks_per_node=4, cpus_per_task=1, gpus_per_node=gpus)
    assert site_settings_of(shape, site) == {"threads": 2} | ({"device": device} if device else {})


def bad(*names: str) -> list[bad_nodes.BadNode]:
    return [
        bad_nodes.BadNode(node=name, cluster="c", reason="ECC", run="a", attempt=1, time=float(number))
        for number, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("failing", "size", "needed", "out"),
    [
        ("n3", 4, 2, ["n3"]),
        ("n3 n1", 4, 2, ["n3"]),  # one in four, the first; n1's next failure is the run's
        ("n3 n1", 8, 2, ["n1", "n3"]),
        ("n3", 4, 4, []),  # the job takes them all
        ("n3", 1, 1, []),
        ("gone n3", 4, 1, ["n3"]),  # SLURM would refuse a job for the name
        ("n1 n2 n3 n4 n5 n6 n7 n8 n9", 1000, 1, [f"n{number}" for number in range(1, 9)]),
    ],
)
def test_how_many_nodes_are_left_out(failing: str, size: int, needed: int, out: list[str]) -> None:
    nodes = {f"n{number}" for number in range(1, size + 1)}
    assert bad_nodes.excludable(bad(*failing.split()), nodes, needed=needed) == out


def test_a_note_says_why_and_how_to_lift_it_and_ends_after_a_day(experiment: Experiment) -> None:
    run = Run(experiment.folder / "runs" / "a")
    for reason in ("rank 1: ECC", "said later"):
        bad_nodes.record_bad_node(experiment, run, node="n3", cluster="c", reason=reason, attempt=1)
    (remark,) = bad_nodes.exclusion_notes(experiment)
    file = experiment.folder / "bad-nodes" / "n3.json"
    assert remark.startswith("Node n3 is excluded from new attempts until ")
    assert "rank 1: ECC (a, attempt 1)" in remark
    assert remark.endswith(f"rm {file}")
    assert bad_nodes.recent_bad_nodes(experiment, cluster="another") == []
    edit(file, time=time.time() - 24 * 3600 - 1)
    assert bad_nodes.recent_bad_nodes(experiment) == []
    edit(file, time="yesterday")
    assert bad_nodes.recent_bad_nodes(experiment) == []
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("in the way, as a full disk would be")
    bad_nodes.record_bad_node(experiment, run, node="n3", cluster="c", reason="rank 1: ECC", attempt=1)
    assert bad_nodes.exclusion_notes(experiment) == []
