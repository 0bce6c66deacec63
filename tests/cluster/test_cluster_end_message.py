"""`on_end` on a cluster, without anybody waiting."""

from __future__ import annotations

import sys
from pathlib import Path

from support.cluster_runs import ONE_RUN, launch, set_partition, site_file, squeue, sweep, wait_for
from support.command_line import succeeded

APPEND = "import sys; open(sys.argv[1], 'a').write(sys.argv[-1] + '\\n')"


def test_the_end_is_told_once_by_the_cluster_itself(slurm_conf: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    site = site_file(tmp_path, on_end=[sys.executable, "-c", APPEND, str(told), "$(touch x)"], retries=0)
    experiment = sweep(tmp_path / "a b;'", *ONE_RUN, "train.steps=2", "matrix.seed=[0,1]")
    first, second = experiment.runs
    set_partition("down")
    launch(experiment.folder, "--replay", site=site)
    assert len(squeue()) == 3
    # Nothing to submit, and nothing to tell yet.
    launch(experiment.folder, "--replay", site=site)
    assert len(squeue()) == 3
    succeeded("cancel", experiment.folder, second.id)
    assert not told.exists()
    set_partition("up")
    wait_for(lambda: not squeue(), seconds=120, why=squeue)
    sentence = f"{experiment.name}: {{}} of 2 runs completed in {experiment.folder}\n"
    assert told.read_text() == sentence.format(1)
    assert first.status().state == "completed"
    set_partition("down")
    launch(experiment.folder, "--replay", site=site)
    succeeded("cancel", experiment.folder)
    set_partition("up")
    wait_for(lambda: not squeue(), seconds=120, why=squeue)
    # All of the second launch was cancelled, which is an end too.
    assert told.read_text() == sentence.format(1) * 2
    assert not Path("x").exists()


def test_the_job_that_tells_the_end_counts_for_the_limit_on_jobs(slurm_conf: Path, tmp_path: Path) -> None:
    experiment = sweep(tmp_path / "e", *ONE_RUN, "train.steps=2", "matrix.seed=[0,1,2]")
    set_partition("down")
    said = launch(
        experiment.folder, "--replay", site=site_file(tmp_path, on_end=["echo"], submit_limit=3, retries=0)
    )
    assert "Submitted 2 of 3 runs" in said
    assert len(squeue()) == 3
