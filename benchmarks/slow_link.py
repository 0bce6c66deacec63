"""A delayed all-reduce over a slow link: 2bw against 1f1b, both with one stage and two data ranks.

    python benchmarks/slow_link.py --rates 25,50,100,200,400 --out benchmarks/results

The ranks run in two network namespaces, joined by a veth pair whose ends send at most `--rates` Mbit/s (tc's
tbf), and exchange gradients and weights over gloo. Compute is emulated: a stage sleeps a known time, twice as
long backward as forward, so that two ranks can be measured on few cores. Times are per step in steady state;
at each rate the arms take turns over `--rounds` rounds. `planned` is what `asyncpp plan --bandwidth` makes of
the same times and bytes. Needs root.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from frame import conditions, in_turns, parser, publish, today
from pipeline import STEPS, ours
from sleeping_stage import ENTRIES, LAYERS

from asyncpp_cli.planner.step_time import StageTimes, step_time
from stages.comm.process import connected
from stages.config.run_config import RunConfig

ARMS = ("1f1b", "2bw")
RANKS = 2
SENT = LAYERS * ENTRIES * RANKS * (4 + 4) * (RANKS - 1) // RANKS
"""Bytes that a rank sends in a step: gradients and weights of the other's half, in float32."""
BURST_SECONDS = 0.004
LEAST_BURST = 100_000
"""Bytes that tc lets through at once: more than the largest packet."""


def planned(options: argparse.Namespace, *, rate: float) -> float:
    """Tokens per second of 2bw over those of 1f1b, as the planner has them."""
    forward, backward = options.forward_ms / 1e3, 2 * options.forward_ms / 1e3
    times = StageTimes(
        forward=(forward,),
        backward=(backward,),
        input_half=(backward / 2,),
        weight_half=(backward / 2,),
        update=(0.0,),
        reduction=(SENT * 8 / (rate * 1e6),),
        message=0.0,
    )
    synchronous, delayed = (
        step_time(arm, times, microbatches=options.microbatches, update_interval=None).seconds for arm in ARMS
    )
    return synchronous / delayed


@contextmanager
def joined_namespaces() -> Iterator[list[str]]:
    """Names of two new network namespaces; the ends of the link between them have the same names."""
    names = [f"aslow{os.getpid()}{side}" for side in "ab"]
    commands = [f"ip netns add {name}" for name in names]
    commands += [f"ip link add {names[0]} netns {names[0]} type veth peer name {names[1]} netns {names[1]}"]
    for number, name in enumerate(names, start=1):
        # Addresses for benchmarks of networks, RFC 2544.
        commands += [f"ip -n {name} addr add 198.18.78.{number}/30 dev {name}"]
        commands += [f"ip -n {name} link set {end} up" for end in ("lo", name)]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def limit(namespace: str, *, rate: float) -> None:
    """Let this end of the link send at most `rate` Mbit/s."""
    burst = max(LEAST_BURST, int(rate * 1e6 / 8 * BURST_SECONDS))
    shape = f"rate {rate}mbit burst {burst} latency 200ms"
    subprocess.run(f"tc -n {namespace} qdisc replace dev {namespace} root tbf {shape}".split(), check=True)


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """A rank's process. Returns seconds per step, by arm and round: those of the slower rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    site = RunConfig().site
    site.device = "cpu"
    with connected(
        rank=options.rank, size=RANKS, local_rank=0, local_size=1, rendezvous=options.folder, site=site
    ) as process:
        arms = {arm: ours(process, options, arm, reduce_ms=0) for arm in ARMS}

        def together(segment: Callable[[], float]) -> float:
            process.gather(None)
            return segment()

        own = in_turns({arm: partial(together, arms[arm]) for arm in ARMS}, rounds=options.rounds)
        by_rank = {arm: process.gather(times) for arm, times in own.items()}
        return {
            arm: [max(of_round) for of_round in zip(*times, strict=True)] for arm, times in by_rank.items()
        }


def at_rate(names: list[str], options: argparse.Namespace, *, rate: float) -> dict[str, list[float]]:
    """As `measure`, by two new processes, one in each namespace."""
    given = ["--forward-ms", options.forward_ms, "--microbatches", options.microbatches]
    given += ["--rounds", options.rounds]
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank, name in enumerate(names):
            limit(name, rate=rate)
            command = [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                __file__,
                "--rank",
                rank,
                "--folder",
                folder,
            ]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": name}
            words = [str(word) for word in (*command, *given)]
            ranks.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"slow_link.py: a rank failed at {rate:g} Mbit/s")
    seconds: dict[str, list[float]] = json.loads(outputs[0])
    return seconds


def row(rate: float, seconds: dict[str, list[float]], *, planned: float) -> dict[str, Any]:
    """A line of the table, from seconds per step by arm and round."""
    ratios = [one / two for one, two in zip(*(seconds[arm] for arm in ARMS), strict=True)]
    return {
        "Mbit/s": rate,
        **{f"{arm}, ms per step": 1e3 * statistics.median(seconds[arm]) for arm in ARMS},
        "tokens/s of 2bw over 1f1b": statistics.median(ratios),
        "lowest round": min(ratios),
        "highest round": max(ratios),
        "planned": planned,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rates", default="25,50,100,200,400", help="of the link, Mbit/s")
    arguments.add_argument(
        "--forward-ms", type=float, default=30.0, help="of a micro-batch; twice that backward"
    )
    arguments.add_argument("--microbatches", type=int, default=4, help="per step and rank")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    # What `pipeline` asks for besides.
    arguments.set_defaults(ranks=1, data=RANKS, ahead=1, ahead_v=0, head_ms=0.0)
    options = arguments.parse_args()
    if options.rank is not None:
        print(json.dumps(measure(options)), flush=True)
        return
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        sys.exit("slow_link.py: a link of limited rate needs root, ip(8) and tc(8)")
    rows, raw = [], []
    with joined_namespaces() as names:
        for rate in map(float, options.rates.split(",")):
            seconds, ratio = at_rate(names, options, rate=rate), planned(options, rate=rate)
            rows.append(row(rate, seconds, planned=ratio))
            raw += [
                [rate, number, *times, ratio]
                for number, times in enumerate(zip(*seconds.values(), strict=True))
            ]
    data = {}
    if options.out:
        file = options.out / f"slow-link-{today()}.csv"
        options.out.mkdir(parents=True, exist_ok=True)
        with file.open("w", newline="", encoding="utf-8") as opened:
            csv.writer(opened).writerows(
                [["mbit", "round", *(f"seconds_{arm}" for arm in ARMS), "planned"], *raw]
            )
        data = {"data": [file.name]}
    del options.rank, options.folder
    where = conditions(options, bytes_sent_per_step=SENT, steps_per_round=STEPS - 1)
    publish("slow-link", "A delayed all-reduce over a slow link", rows, where, options, **data)


if __name__ == "__main__":
    main()
