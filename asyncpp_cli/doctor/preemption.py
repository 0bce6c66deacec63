"""Checks of preemption and requeueing: whether runs have the time to save, and are started again."""

from __future__ import annotations

import re
from collections.abc import Mapping

from asyncpp_cli.doctor.checks import Check, good, wrong
from asyncpp_cli.launch.sites import Site
from stages.config import SiteConfig


def _grace(site: Site) -> float:
    return float(site.run.get("grace", SiteConfig().grace))


def preemption_check(site: Site, config: Mapping[str, str], partition: Mapping[str, str]) -> Check:
    """Whether a preempted run has the time to save, and is requeued.

    Args:
        site: site profile.
        config: SLURM's settings.
        partition: settings of the profile's partition.
    """
    kind = config.get("PreemptType", "preempt/none")
    mode = partition.get("PreemptMode", config.get("PreemptMode", "OFF")).upper()
    if kind == "preempt/none" or mode == "OFF":
        return good("preemption", "jobs of this partition are not preempted")
    seconds = int(partition.get("GraceTime", "0"))
    signalled = "send_user_signal" in config.get("PreemptParameters", "")
    detail = f"{mode}, GraceTime {seconds} s, signal {'USR2' if signalled else 'TERM'}"
    if mode not in ("REQUEUE", "CANCEL"):
        note = "a run that is suspended for longer than site.timeout fails; launch again to resume"
        return good("preemption", detail, note=note)
    notes = []
    if seconds < _grace(site):
        notes.append(
            f"saving may take {_grace(site):g} s (run.grace): ask for a GraceTime as long, or shorten it; "
            "otherwise a preempted run resumes from its newest checkpoint"
        )
    if mode == "CANCEL":
        notes.append("SLURM does not requeue preempted jobs: launch again to resume")
    return good("preemption", detail, note="; ".join(notes))


def requeue_check(site: Site, config: Mapping[str, str]) -> Check:
    """Whether jobs can be requeued, and have the time to save when they are cancelled."""
    wait = re.match(r"\d+", config.get("KillWait", ""))
    seconds = int(wait[0]) if wait else 0
    detail = (
        f"JobRequeue {config.get('JobRequeue', '?')}, KillWait {seconds} s; "
        f"signalled {site.signal_lead} s before the time limit"
    )
    if "requeue" in site.remove_flags and config.get("JobRequeue") == "0":
        advice = f"{site.file}: remove_flags: do not remove requeue; without it no run is requeued"
        return wrong("requeue", detail, advice=advice)
    if seconds < _grace(site):
        note = (
            f"after scancel a run has KillWait to save; it may take {_grace(site):g} s (run.grace). "
            "`asyncpp cancel` waits for it"
        )
        return good("requeue", detail, note=note)
    return good("requeue", detail)
