"""A process is named by more than host and pid: boot and PID namespace, too."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.attempts import claimed
from support.command_line import ran
from support.files import edit
from support.report_experiment import ExperimentFolder, settings

from asyncpp_cli.runs.attempts.attempt import Attempt
from asyncpp_cli.runs.attempts.claims import claim
from asyncpp_cli.runs.attempts.files import Claimed, Outcome, RankStart
from asyncpp_cli.runs.attempts.settle import current_status
from asyncpp_cli.runs.processes import ProcessId, is_gone, is_local, send_signal, this_process
from asyncpp_cli.runs.status import State, Status
from stages.config.records import DamagedError, converted

IN_ANOTHER_NAMESPACE = ("unshare", "--pid", "--fork")


def may_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return ran(*IN_ANOTHER_NAMESPACE, "true").code == 0


needs_unshare = pytest.mark.skipif(not may_unshare(), reason="no PID namespaces are permitted here")

NAME = "import json; from asyncpp_cli.runs.processes import *; "


def test_a_process_of_another_boot_or_namespace_is_elsewhere() -> None:
    me = this_process()
    gone = replace(me, start=me.start + 1)
    assert (is_local(me), is_gone(me), is_gone(gone)) == (True, False, True)
    of_another_boot = replace(gone, boot="00000000-0000-0000-0000-000000000000")
    for elsewhere in (replace(gone, host="elsewhere"), of_another_boot, replace(gone, namespace="pid:[1]")):
        assert (is_local(elsewhere), is_gone(elsewhere)) == (False, False)
        send_signal(replace(elsewhere, start=me.start), signal.SIGKILL)  # would be the end of this test
    # Where boot and namespace are unknown, by host, pid and start alone.
    earlier = ProcessId(me.host, me.pid, me.start)
    assert (is_local(earlier), is_gone(earlier)) == (True, False)


GOOD = {"host": "h", "pid": 1, "start": 1}


@pytest.mark.parametrize(
    "record",
    [
        *(None, 3, [], {}, GOOD | {"start": "1"}, GOOD | {"host": 3}, GOOD | {"boot": None}),
        *(GOOD | {"pid": pid} for pid in (0, -1, 10**30, True)),
    ],
)
def test_malformed_process_records_are_refused(record: object) -> None:
    with pytest.raises(DamagedError, match=r"^here: "):
        converted(record, ProcessId, where="here")


@needs_unshare
def test_a_living_run_in_another_pid_namespace_is_not_declared_gone(tmp_path: Path) -> None:
    """The host has the same name there, and the pid is nobody's here, or another's."""
    experiment = ExperimentFolder(tmp_path / "e")
    run = experiment.add(settings("2bw", "adamw"), status=Status(state=State.PENDING))
    attempt = claimed(run, processes=1, replay=True, steps=4)
    code = NAME + "import sys; print(json.dumps(vars(this_process())), flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [*IN_ANOTHER_NAMESPACE, sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        there = ProcessId(**json.loads(child.stdout.readline()))
        assert there.host == this_process().host
        assert there.namespace != this_process().namespace
        attempt.record_start(0, there)
        edit(attempt.file(Claimed), by=asdict(there))
        assert not is_local(there)
        # By host, pid and start alone it is gone, and the run would have been trained twice.
        assert is_gone(replace(there, boot="", namespace="", start=1))
        assert current_status(run).state == State.RUNNING
        assert claim(run, processes=1, replay=True, steps=4) is None

        # And the other way round: from there, this process is not looked for.
        mine = json.dumps(asdict(this_process()))
        asked = [*IN_ANOTHER_NAMESPACE, sys.executable, "-c", NAME + f"print(is_gone(ProcessId(**{mine})))"]
        assert ran(*asked).output == "False\n"
    # When its lease is over nobody waits for it any more.
    os.utime(attempt.file(RankStart, 0), (1.0, 1.0))
    assert current_status(run).state == State.FAILED
    assert Attempt(run, 1).read(Outcome) is not None
