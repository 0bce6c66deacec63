"""SLURM's words for a job's state, each decided."""

from __future__ import annotations

import pytest

from asyncpp_cli.slurm.client import JobPhase, phase_of

DECIDED = {
    JobPhase.PENDING: "PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD EXPEDITING",
    JobPhase.RUNNING: "RUNNING SIGNALING CONFIGURING POWER_UP_NODE RESIZING STOPPED SUSPENDED UPDATE_DB",
    JobPhase.ENDING: "COMPLETING STAGE_OUT",
    JobPhase.ENDED: "COMPLETED CANCELLED FAILED TIMEOUT NODE_FAIL PREEMPTED BOOT_FAIL DEADLINE OUT_OF_MEMORY "
    "REVOKED LAUNCH_FAILED RECONFIG_FAIL",
}


@pytest.mark.parametrize(
    ("word", "phase"), [(word, phase) for phase, words in DECIDED.items() for word in words.split()]
)
def test_every_word_has_a_phase(word: str, phase: JobPhase) -> None:
    assert phase_of(word) is phase


def test_a_word_of_a_later_slurm_counts_as_running() -> None:
    assert phase_of("TELEPORTING") is JobPhase.RUNNING
