"""`asyncpp doctor` and `asyncpp logs` on the real cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.cluster_runs import (
    ONE_RUN,
    launch,
    set_partition,
    site_file,
    squeue,
    sweep,
    wait_for,
    without_accounting,
)
from support.command_line import succeeded

from asyncpp_cli.doctor.checks import Check, submission_check
from asyncpp_cli.doctor.job import job_checks
from asyncpp_cli.sites.profile import find_site


def test_the_test_cluster_is_fit_and_a_job_sees_the_folder(slurm_conf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a b;'c\"$(touch x)"
    folder.mkdir()
    asked = succeeded("doctor", "--site", "testcluster", "--dir", folder, "--job", "--json")
    checks = {check["check"]: check for check in json.loads(asked.output)}
    assert {"gloo", "submission", "job", "software of a node"} <= set(checks)
    assert "found each other and exchanged tensors (gloo, " in checks["two nodes"]["detail"]
    assert list(folder.iterdir()) == []
    # SLURM shows a job that has ended until its nodes are cleaned up.
    wait_for(lambda: squeue() == [], seconds=60, why=squeue)


def test_nodes_that_cannot_reach_each_other_are_reported_before_a_run_starts(
    slurm_conf: Path, tmp_path: Path
) -> None:
    site = find_site(str(site_file(tmp_path, network_interface="ib7")))
    checks = {check.check: check for check in job_checks(site, tmp_path)}
    assert {name for name, check in checks.items() if not check.ok} == {"two nodes"}
    assert "GLOO_SOCKET_IFNAME is ib7, and there is no such network interface" in checks["two nodes"].detail
    assert "network_interface" in checks["two nodes"].advice


def test_resources_that_the_cluster_lacks_are_named(
    slurm_conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(without_accounting(slurm_conf, tmp_path)))
    # Without accounting nothing is wrong by that, nor with an account that nobody keeps.
    refused = submission(tmp_path, memory="900G", account="nobodys")
    assert not refused.ok
    assert "Memory" in refused.detail or "node configuration" in refused.detail
    assert "memory" in refused.advice

    monkeypatch.setenv("SLURM_CONF", str(slurm_conf))
    refused = submission(tmp_path, exclude="n[1,7-8]")
    assert "Invalid node name" in refused.detail
    assert ": exclude: " in refused.advice
    assert submission(tmp_path, exclude="n[1-2]").verdict == "ok"
    assert "invalid partition" in submission(tmp_path, partition="gpu").detail


def submission(tmp_path: Path, **changes: Any) -> Check:
    return submission_check(find_site(str(site_file(tmp_path, **changes))))


def test_logs_of_a_run_on_the_cluster(slurm_conf: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words to train on, again and again. " * 500)
    experiment = sweep(tmp_path / "e", *ONE_RUN, "train.steps=2", f"data.path={text}")
    (run,) = experiment.runs
    set_partition("down")
    launch(experiment.folder, site=site_file(tmp_path, retries=0))
    text.unlink()
    set_partition("up")
    followed = succeeded("logs", experiment.folder, run.id[:8], "-f")
    assert "text.txt" in followed.output
    assert f"{run.id} is failed: rank " in followed.errors
    wait_for(lambda: not squeue(), seconds=60)
    for rank in (0, 1):
        shown = succeeded("logs", experiment.folder, run.id, "--rank", str(rank))
        assert f"attempt-1-rank-{rank}.log" in shown.errors
