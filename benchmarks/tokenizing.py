"""`asyncpp data prepare` compared with the library `tokenizers` alone: same documents, tokenizer, cores.

    python benchmarks/tokenizing.py TEXT TOKENIZER --out benchmarks/results

TEXT is a file for `--separator '<|endoftext|>'`, TOKENIZER what `--tokenizer` takes. The library alone is
given lists of documents that are in memory already, half a MiB each as here, with all its threads, and
nothing is kept of what it gives but the count of tokens. Ours reads the file, splits, hashes, converts,
writes and syncs shards, and starts its processes; it is timed from the command to its end. Both take turns,
several times. To hold: the median of the last row at least 0.9.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from frame import conditions, in_turns, parser, publish, seconds_of

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
        prepare = [
            sys.executable,
            "-m",
            "asyncpp_cli",
            "data",
            "prepare",
            str(text),
            "--tokenizer",
            tokenizer,
        ]
        where = ["--out", f"{folder}/out", "--workers", str(workers)]
        return seconds_of(lambda: subprocess.run([*prepare, *where], check=True, capture_output=True))


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
    arguments = parser(__doc__)
    arguments.add_argument("text", type=Path)
    arguments.add_argument("tokenizer")
    arguments.add_argument("--repeat", type=int, default=4)
    options = arguments.parse_args()
    workers = this_machine().cores
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    batches = batches_of(options.text)
    size = sum(len(document.encode()) for batch in batches for document in batch)
    tokenizer = read_tokenizer(options.tokenizer, end=None)
    assert tokenizer.text is not None
    tokens = 0

    def alone() -> float:
        nonlocal tokens
        seconds, tokens = library_alone(batches, tokenizer.text)
        return seconds

    times = in_turns(
        {"library": alone, "ours": lambda: ours(options.text, options.tokenizer, workers)},
        rounds=options.repeat,
    )
    pairs = list(zip(times["library"], times["ours"], strict=True))
    figures = {
        "library_alone_s": times["library"],
        "ours_s": times["ours"],
        "ours_MB_per_s": [size / whole / 1e6 for whole in times["ours"]],
        "speed, ours to library, median": statistics.median(library / whole for library, whole in pairs),
    }
    where = conditions(options, bytes=size, documents=sum(map(len, batches)), tokens=tokens, workers=workers)
    where |= {"tokenizers": version("tokenizers")}
    publish("tokenizing", "Tokenizing compared with the library alone", [figures], where, options)


if __name__ == "__main__":
    main()
