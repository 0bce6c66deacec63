"""`asyncpp data prepare` compared with the library `tokenizers` alone: same documents, tokenizer, cores.

    python benchmarks/tokenizing.py TEXT TOKENIZER --out benchmarks/results

TEXT is a file for `--separator '<|endoftext|>'`, TOKENIZER what `--tokenizer` takes. The library alone is
given lists of documents that are in memory already, half a MiB each as here, with all its threads, and
nothing is kept of what it gives but the count of tokens. Ours reads the file, splits, hashes, converts,
writes and syncs shards, and starts its processes; it is timed from the command to its end. Both take turns,
several times. Writes `tokenizing-DATE.md`.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from dated import today, write_dated

from asyncpp_cli.data.documents import documents
from asyncpp_cli.data.parts import part_size, parts
from asyncpp_cli.data.sources import find_sources
from asyncpp_cli.data.tokenizers import BATCH, read_tokenizer
from asyncpp_cli.sites.resources import this_machine

SEPARATOR = "<|endoftext|>"


def library_alone(batches: list[list[str]], tokenizer_text: str) -> tuple[float, int]:
    """Seconds, and tokens, of `encode_batch_fast` with all threads (the variant without offsets)."""
    from tokenizers import Tokenizer

    # Made anew: its cache of words begins empty, as ours does.
    tokenizer = Tokenizer.from_str(tokenizer_text)
    begun = time.perf_counter()
    tokens = sum(
        len(encoding.ids)
        for batch in batches
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    )
    return time.perf_counter() - begun, tokens


def ours(text: Path, tokenizer: str, workers: int) -> float:
    """Seconds of the whole command."""
    with tempfile.TemporaryDirectory(prefix="asyncpp-tokenizing-") as folder:
        command = [
            sys.executable,
            "-m",
            "asyncpp_cli",
            "data",
            "prepare",
            str(text),
            "--tokenizer",
            tokenizer,
        ]
        begun = time.perf_counter()
        subprocess.run(
            [*command, "--out", f"{folder}/out", "--workers", str(workers)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return time.perf_counter() - begun


def batches_of(text: Path) -> list[list[str]]:
    """The documents, in lists as long as ours gives the library."""
    sources = find_sources([str(text)])
    batches: list[list[str]] = [[]]
    size = 0
    for part in parts(sources, size=part_size(sources), separator=SEPARATOR, field="text"):
        for piece in part.pieces:
            for document in documents(piece, field="text", separator=SEPARATOR):
                batches[-1].append(document.decode())
                size += len(document)
                if size >= BATCH:
                    batches.append([])
                    size = 0
    return batches


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("text", type=Path)
    options.add_argument("tokenizer")
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--repeat", type=int, default=4)
    given = options.parse_args()
    workers = this_machine().cores
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    batches = batches_of(given.text)
    size = sum(len(document.encode()) for batch in batches for document in batch)
    tokenizer = read_tokenizer(given.tokenizer, end=None)
    assert tokenizer.text is not None
    rows = []
    for number in range(given.repeat):
        load = os.getloadavg()[0]
        # In turns first and second, so that a load that rises or falls favours neither.
        if number % 2:
            whole = ours(given.text, given.tokenizer, workers)
            alone, tokens = library_alone(batches, tokenizer.text)
        else:
            alone, tokens = library_alone(batches, tokenizer.text)
            whole = ours(given.text, given.tokenizer, workers)
        rows.append((alone, whole, load))
        print(
            f"{number}: library {alone:.1f} s, ours {whole:.1f} s, ratio {alone / whole:.2f}, load {load:.1f}"
        )
    ratio = statistics.median(alone / whole for alone, whole, _ in rows)
    lines = [
        f"# Tokenizing, {today()}",
        "",
        f"`asyncpp data prepare` and `tokenizers` {version('tokenizers')} (`encode_batch_fast`, all "
        "threads, documents in",
        "memory, nothing kept), turn by turn. Ours is the whole command: it starts Python, reads, splits,",
        "hashes, converts, writes and syncs.",
        "",
        f"Text: {size:,} bytes, {sum(map(len, batches)):,} documents, {tokens:,} tokens; {tokenizer.name}.",
        f"{workers} cores, {platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}.",
        "The load of the machine, other programs included, stands next to each turn.",
        "",
        "| turn | library alone, s | ours, s | ours, MB/s | speed, ours to library | load before |",
        "|---|---|---|---|---|---|",
        *(
            f"| {number} | {alone:.2f} | {whole:.2f} | {size / whole / 1e6:.2f} | {alone / whole:.2f} "
            f"| {load:.1f} |"
            for number, (alone, whole, load) in enumerate(rows)
        ),
        "",
        f"Median of the last but one column: **{ratio:.2f}** (to hold: at least 0.9).",
        "",
    ]
    write_dated(given.out, "tokenizing", "\n".join(lines))


if __name__ == "__main__":
    main()
