"""Site profiles: what they may say, and what a cell takes there."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.command_line import Ended, ran
from support.launches import ONE, sweep

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.experiment.matrix import ResolvedCell
from asyncpp_cli.launch.common.arrays import JobShape, PlannedArray, plan_arrays, shape_of
from asyncpp_cli.launch.common.options import LaunchOptions
from asyncpp_cli.launch.common.supervisor import tasks_of_node
from asyncpp_cli.launch.submission import submit
from asyncpp_cli.launch.submission.sbatch import BatchJob, array_command
from asyncpp_cli.launch.submission.sbatch import script as script_of
from asyncpp_cli.planner.cells import expected
from asyncpp_cli.runs.experiment_folder import Cell, open_experiment
from asyncpp_cli.runs.settings import with_settings
from asyncpp_cli.sites.profile import (
    Site,
    find_site,
    read_site,
    seconds_of,
    site_files,
    time_note,
    user_folder,
)
from stages.config.run_config import RunConfig

COMMAND = array_command("array-1.json")


@pytest.fixture(autouse=True)
def own_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    user_folder().mkdir(parents=True)
    return user_folder()


def site_of(folder: Path, text: str) -> Site:
    """A profile `mine` with this text."""
    file = folder / "mine.yaml"
    file.write_text(f"{text}\n")
    return read_site(file, name="mine")


def config(*, stages: int, **site: object) -> RunConfig:
    made = RunConfig()
    settings = {"schedule.name": "1f1b", "model.layers": stages, "train.steps": 1, "parallel.stages": stages}
    return with_settings(made, settings | {f"site.{key}": value for key, value in site.items()})


def test_every_shipped_profile_is_accepted() -> None:
    assert {"local", "testcluster"} <= set(site_files())
    for name in site_files():
        assert find_site(name).description


def test_a_user_profile_is_found_by_name_and_by_path(own_profiles: Path, tmp_path: Path) -> None:
    (own_profiles / "mine.yaml").write_text("partition: a\ntime: '90'\n")
    (own_profiles / "testcluster.yaml").write_text("partition: b\n")
    text = "gpus_per_node: 4\nrun: {grace: 60, threads: 2}\nsrun_flags: [--distribution=block]"
    (tmp_path / "there.yml").write_text(text)
    assert (find_site("mine").partition, find_site("mine").time) == ("a", "90")
    assert find_site("testcluster").partition == "b"
    there = find_site(str(tmp_path / "there.yml"))
    assert (there.name, there.gpus_per_node, there.run) == ("there", 4, {"grace": 60.0, "threads": 2})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partitoin: a", "partitoin: unknown key; did you mean partition?"),
        ("gpus_per_node: many", 'gpus_per_node is "many"; accepted: a whole number >= 0'),
        ("gpus_per_node: true", "gpus_per_node is true; accepted: a whole number"),
        ("time: 'soon'", 'time is "soon"; accepted: '),
        ("memory: lots", 'memory is "lots"; accepted: an amount of memory'),
        ("setup: module load cuda", 'setup is "module load cuda"; accepted: a list'),
        (
            "setup: ['true', 'if true; then', 'false']",
            "setup: 'if true; then' begins no whole command of bash",
        ),
        ("environment: {A-B: 1}", "environment: 'A-B' is not a name"),
        ("environment: {A: [1]}", "environment[...] is not accepted; accepted: text"),
        ("flags: {--exclusive: true}", "flags: --exclusive: accepted: a flag's name without its dashes"),
        ("flags: {output: x}", "flags: output is set by asyncpp"),
        ("remove_flags: [job-name]", "remove_flags: job-name is set by asyncpp"),
        ("srun_flags: [mpi]", 'srun_flags[0] is "mpi"; accepted: --name=value'),
        (
            "srun_flags: [--distribution=cyclic]",
            "srun_flags: --distribution=cyclic: accepted: block; a rank's",
        ),
        ("srun_flags: [--mpi=none, -mplane=2]", "srun_flags: -mplane=2: accepted: block"),
        ("partition: 'a b'", 'partition is "a b"; accepted: text without white space'),
        ("run: {threds: 2}", "run.threds: unknown key; did you mean site.threads?"),
        ("run: {grace: 200}", "signal_lead: 120 s are too few; accepted: at least run.grace (200)"),
        # sbatch's MINUTES:SECONDS, meant as hours.
        ("time: '4:00'\nsignal_lead: 300", "signal_lead: 300 s before its time limit a job is told to end, "),
        (
            "time: '2'",
            "signal_lead: 120 s before its time limit a job is told to end, which is before",
        ),
        ("time: '1-1440-1'", 'time is "1-1440-1"; accepted:'),
        ("time: '4h'", 'time is "4h"; accepted:'),
        ("time: '1-5:99'", 'time is "1-5:99"; accepted:'),
        ("flags: {nice: '1e3'}", "flags: nice is '1e3'; accepted: a whole number"),
        ("flags: {priority: high}", "flags: priority is 'high'; accepted: a whole number >= 0, or TOP"),
        ("flags: {time-min: '5:99:99'}", "flags: time-min is '5:99:99'; accepted: 'MINUTES'"),
        ("flags: {mem-per-cpu: 1e3}", "flags: mem-per-cpu is '1e3'; accepted: an amount of memory"),
        ("flags: {exclusive: 'yes'}", "flags: exclusive is 'yes'; accepted: true, user, mcs, topo"),
        ("flags: {hold: 1}", "flags: hold is '1'; accepted: true"),
        ("flags: {gpus-per-task: a b}", "flags: gpus-per-task is 'a b'; accepted: a number, or TYPE:NUMBER"),
        ("flags: {switches: 1@99:99}", "flags: switches is '1@99:99'; accepted: a number, or NUMBER@TIME"),
        ("flags: {comment: [a]}", "flags: comment is ['a']; accepted: text, a number or true"),
        ("flags: {time: '60'}", "flags: time has a key of its own; write time for it"),
        ("time_margin: 0.5", "time_margin is 0.5; accepted: a number >= 1 or null"),
        ("array_limit: 0", "array_limit is 0; accepted: a whole number >= 1"),
        ("scheduler: pbs", 'scheduler is "pbs"; accepted: local, slurm'),
        ("container: x", "container: unknown key; write command_prefix: apptainer exec --nv IMAGE"),
        ("command_prefix: a 'b", 'command_prefix: "a \'b" (No closing quotation); accepted: words, quoted'),
        ("python: A=1", 'python is "A=1"; accepted: the name or path of a program'),
    ],
)
def test_a_mistake_is_refused_by_file_and_key(own_profiles: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        site_of(own_profiles, text)
    assert str(refused.value).startswith(f"{own_profiles}/mine.yaml: {message}")


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        *(("1440", 86_400), ("90", 5400), ("1000:00:00", 3_600_000), ("24:00:00", 86_400), ("4:00", 240)),
        *(("2-12", 216_000), ("1-00:00:01", 86_401), ("0", math.inf)),
    ],
)
def test_a_time_limit_is_what_sbatch_takes_it_for(own_profiles: Path, time: str, seconds: float) -> None:
    assert seconds_of(site_of(own_profiles, f"time: '{time}'\nsignal_lead: 100").time) == seconds
    assert time_note(time) == (
        '"4:00" is 4 minutes, as for sbatch; hours: "4:00:00"' if time == "4:00" else ""
    )


@pytest.mark.parametrize(
    ("stages", "profile", "shape"),
    [
        (8, "gpus_per_node: 8", (1, 8, 8, 1, 8)),
        (2, "gpus_per_node: 8\ncpus_per_task: 12", (1, 2, 2, 12, 2)),
        (16, "gpus_per_node: 8", (2, 16, 8, 1, 8)),
        (12, "gpus_per_node: 8", (2, 12, 6, 1, 6)),
        (5, "gpus_per_node: 4", (2, 5, 3, 1, 3)),
        (4, "tasks_per_node: 1", (4, 4, 1, 1, 0)),
        (4, "cpus_per_node: 8\ncpus_per_task: 4", (2, 4, 2, 4, 0)),
        (4, "partition: any", (1, 4, 4, 1, 0)),
    ],
)
def test_a_cell_takes_one_task_per_rank_and_one_gpu_per_task(
    own_profiles: Path, stages: int, profile: str, shape: tuple[int, int, int, int, int]
) -> None:
    names = ("nodes", "tasks", "tasks_per_node", "cpus_per_task", "gpus_per_node")
    wanted = JobShape(**dict(zip(names, shape, strict=True)))
    site = site_of(own_profiles, profile)
    assert shape_of(config(stages=stages), site, replay=False) == wanted
    alone = shape_of(config(stages=stages), site, replay=True)
    assert (alone.nodes, alone.tasks, alone.gpus_per_node) == (1, 1, min(1, wanted.gpus_per_node))


def test_a_cell_for_which_a_site_has_no_room_is_refused(own_profiles: Path) -> None:
    for profile, cell, key in (
        ("cpus_per_node: 2\ncpus_per_task: 4", config(stages=2), "cpus_per_node"),
        ("gpus_per_node: 2\nmax_nodes: 1", config(stages=4), "max_nodes"),
        ("partition: any", config(stages=2, device="cuda"), "gpus_per_node"),
        ("gpus_per_node: 1", config(stages=1, runs_per_gpu=2), "flags"),
    ):
        site = site_of(own_profiles, profile)
        with pytest.raises(UserError, match=f"mine.yaml: {key}: "):
            shape_of(cell, site, replay=False)
    sharded = site_of(own_profiles, "gpus_per_node: 1\nflags: {gres: 'shard:1'}")
    assert shape_of(config(stages=1, runs_per_gpu=2), sharded, replay=False).tasks == 1


def test_how_many_tasks_a_node_has() -> None:
    assert [tasks_of_node("2(x3),1", node=node) for node in range(4)] == [2, 2, 2, 1]
    assert tasks_of_node("3", node=0) == 3
    with pytest.raises(ValueError, match="does not say"):
        tasks_of_node("2(x3),1", node=4)


def test_the_script_has_what_the_site_adds_and_lacks_what_it_removes(
    own_profiles: Path, tmp_path: Path
) -> None:
    site = site_of(
        own_profiles,
        "gpus_per_node: 4\ngpu_type: h100\ntime: '2-00:00:00'\nsignal_lead: 240\nmemory: 64G\n"
        'setup: [module load cuda]\nenvironment: {SAID: "a b\';$(touch x)"}\n'
        "flags: {exclusive: true, licenses: 'a:1 b'}\nremove_flags: [requeue, open-mode]\n",
    )
    shape = shape_of(config(stages=8), site, replay=False)
    job = BatchJob(name="asyncpp-e-1", shape=shape, tasks=7, at_once=3, code="c0de", command=COMMAND)
    script = script_of(site, tmp_path, job)
    flags = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in script.splitlines()
        if line.startswith("#SBATCH")
    )
    assert flags == {
        "array": "0-6%3",
        "cpus-per-task": "1",
        "exclusive": "",
        "gres": "gpu:h100:4",
        "job-name": "asyncpp-e-1",
        "licenses": "'a:1 b'",
        "mem": "64G",
        "nodes": "2",
        "ntasks": "8",
        "ntasks-per-node": "4",
        "output": "%A_%a.out",
        "signal": "USR2@240",
        "time": "2-00:00:00",
    }
    done = begun(script.replace("module load cuda", "true"), tmp_path, 'printf %s "$SAID"')
    assert done.output == "a b';$(touch x)"
    assert not (tmp_path / "x").exists()
    assert script.rstrip().endswith(" -m asyncpp_cli.launch.job.array_entry array-1.json")


def begun(script: str, folder: Path, then: str) -> Ended:
    """Run a job's script up to its own command, and another command instead of that."""
    return ran("bash", "-c", script.partition("# command")[0] + then, cwd=folder)


@pytest.mark.parametrize(
    ("setup", "failed"),
    [
        (["module load cuda 2> /dev/null", "true"], "module load cuda 2> /dev/null"),
        (["cd /no/such 2> /dev/null && true"], "cd /no/such 2> /dev/null && true"),
        (["source /no/such 2> /dev/null", "export A=1"], "source /no/such 2> /dev/null"),
        (["if true; then", "(exit 3)", "fi"], "if true; then\n(exit 3)\nfi"),
        (["set -u", "true || false", "# a remark", "", "false || true", "sleep 0 &"], ""),
        (["if false; then", "false", "else", "true", "fi", "cat <<END > /dev/null", "false", "END"], ""),
        (["test a \\", "= b"], "test a \\\n= b"),
        (["test a = a\\\\a || test 'a$\"' != b"], ""),
    ],
)
def test_a_job_ends_where_a_line_of_its_setup_fails(
    own_profiles: Path, tmp_path: Path, setup: list[str], failed: str
) -> None:
    site = site_of(own_profiles, json.dumps({"setup": setup, "environment": {"A": "b"}}))
    shape = shape_of(config(stages=2), site, replay=False)
    job = BatchJob(name="a", shape=shape, tasks=1, command=COMMAND, code="c0de")
    done = begun(script_of(site, tmp_path, job), tmp_path, "echo ran")
    assert (done.output, done.code) == (("", 1) if failed else ("ran\n", 0))
    said = done.errors.strip()
    assert said.startswith(f"{failed} (setup of the site) failed with exit code ") if failed else said == ""
    # A variable that bash does not set is as good as a line that fails.
    site = site_of(own_profiles, "environment: {UID: 5}")
    done = begun(script_of(site, tmp_path, job), tmp_path, "echo ran")
    assert (done.output, done.code) == ("", 1)
    assert "setting UID (environment of the site) failed with exit code 1" in done.errors


def test_a_number_in_a_profile_is_a_number_to_sbatch(own_profiles: Path, tmp_path: Path) -> None:
    numbers = "{nice: 1e3, priority: 1_0, gpus-per-task: 1e0, mem-per-gpu: 4096, time-min: 90, comment: 1e3}"
    site = site_of(own_profiles, f"flags: {numbers}")
    shape = shape_of(config(stages=2), site, replay=False)
    job = BatchJob(name="a", shape=shape, tasks=1, command=COMMAND, code="c0de")
    script = script_of(site, tmp_path, job)
    for flag in (
        "nice=1000",
        "priority=10",
        "gpus-per-task=1",
        "mem-per-gpu=4096",
        "time-min=90",
        "comment=1e3",
    ):
        assert f"#SBATCH --{flag}\n" in script
    assert site_of(own_profiles, "flags: {nice: true}").flags == {"nice": True}


def test_the_shipped_profile_of_gpus_asks_for_what_a_run_needs(tmp_path: Path) -> None:
    """GPUs, memory and time of its runs, and not for whole nodes."""
    [run] = sweep(tmp_path / "e", *ONE, "model=360m", "train.steps=2000000").runs
    shipped = find_site("slurm-gpu")
    cell = ResolvedCell(Cell(id=run.id, axes={}), run.config())
    [estimate] = expected("e", [cell], site=shipped)
    assert estimate.step_seconds is not None
    minutes = math.ceil((2 * 2_000_000 * estimate.step_seconds + 900 + 300) / 60)
    assert 60 < minutes < 24 * 60

    def planned(site: Site, **options: Any) -> PlannedArray:
        [array] = plan_arrays([run], site, LaunchOptions(**options), max_array_size=9)
        return array

    asked = planned(shipped)
    assert (asked.time, asked.shape.gpus_per_node) == (str(minutes), 2)
    half = planned(shipped, pauses={run.id: 1_000_000})
    assert int(half.time) < minutes
    script = submit.array_script(open_experiment(tmp_path / "e"), shipped, asked)
    assert f"#SBATCH --time={minutes}\n" in script
    assert "#SBATCH --mem-per-gpu=100G\n" in script
    assert "exclusive" not in script
    # Never more than the profile's time; and that where the time of a step is not known.
    assert planned(replace(shipped, time="60")).time == "60"
    assert planned(replace(shipped, run={"grace": 240.0})).time == "24:00:00"
    assert planned(replace(shipped, time_margin=None)).time == "24:00:00"


def test_text_of_a_profile_is_what_was_written(own_profiles: Path) -> None:
    site = site_of(
        own_profiles,
        "{time: 1:30:00, account: 007, constraint: 0x10, partition: 2024_01, environment: {A: 12.10}, "
        "flags: {licenses: 1.10, exclusive: true}, qos: '${oc.env:ASYNCPP_QOS,short}', run: {grace: 1e1}}",
    )
    assert (site.time, site.account, site.constraint, site.partition) == ("1:30:00", "007", "0x10", "2024_01")
    assert site.environment == {"A": "12.10"}
    assert site.flags == {"licenses": "1.10", "exclusive": True}
    assert site.qos == "short"
    assert site.run == {"grace": 10.0}
