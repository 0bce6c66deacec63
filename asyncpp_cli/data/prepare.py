"""`asyncpp data prepare`: turns inputs into a folder of token shards with a manifest, in parallel processes.

An unfinished folder holds `unfinished/` with the plan and a record of each finished part; the same command
resumes from them.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncpp_cli.base.atomic_files import read_json, write_json, write_text
from asyncpp_cli.base.console import say
from asyncpp_cli.base.errors import DamagedError, UserError
from asyncpp_cli.data.documents import documents, is_held_out
from asyncpp_cli.data.manifest import manifest
from asyncpp_cli.data.parts import InputPart, part_size, parts
from asyncpp_cli.data.sources import Source
from asyncpp_cli.data.tokenizers import Tokenizer, read_tokenizer, sha256_of, train_size, train_tokenizer
from asyncpp_cli.data.worker import (
    PartRecord,
    ShardSettings,
    finished_record,
    start_worker,
    tokenize_in_worker,
)
from stages.data.dataset import cache_folder
from stages.data.integrity import ShardFacts, cache_facts
from stages.data.prepared import FORMAT, MANIFEST, UNFINISHED, Prepared, read_prepared
from stages.data.shards import dtype_for

_SECONDS_BETWEEN_LINES = 15.0

TOKENIZER = "tokenizer.json"
PLAN = "plan.json"
TRAIN_ON = 1 << 27
"""Most bytes of text to train a tokenizer on: an equal share from the beginning of every file."""


@dataclass(frozen=True, kw_only=True)
class PrepareOrder:
    """The arguments of `asyncpp data prepare`."""

    sources: Sequence[Source]
    tokenizer: str
    end: str | None
    """End-of-document token, if the user named one."""
    start: str | None
    """Token that begins each document, if the user named one."""
    field: str
    separator: str
    validation_share: float
    out: Path
    workers: int


class PrepareProgress:
    """Says on standard error, every few seconds, how far a preparation is."""

    def __init__(self, size: int) -> None:
        self._size, self._read, self._tokens = size, 0, 0
        self._last = time.monotonic()

    def done(self, read: int, tokens: int) -> None:
        """A part of `read` bytes of input was finished and produced `tokens` tokens."""
        self._read += read
        self._tokens += tokens
        if time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            say(f"{self._read / max(1, self._size):.0%} of the input read, {self._tokens:,} tokens")


def prepare_data(order: PrepareOrder) -> tuple[Prepared, bool]:
    """Prepare the data, or the parts that are missing.

    Returns:
        The prepared data, and whether there was anything to do.

    Raises:
        UserError: an input or the tokenizer cannot be read, or the folder holds something else.
        KeyboardInterrupt: finished parts are kept.
    """
    _check_folder(order.out)
    started_plan = _started_plan(order.out)
    tokenizer = _tokenizer(order, started_plan=started_plan)
    settings = ShardSettings(
        tokenizer=order.tokenizer if train_size(order.tokenizer) is not None else tokenizer.name,
        tokenizer_sha256=sha256_of(tokenizer),
        end_of_document=tokenizer.end_of_document,
        start_of_document=tokenizer.start_of_document,
        field=order.field,
        separator=order.separator,
        validation_share=order.validation_share,
    )
    plan = {
        "settings": asdict(settings),
        "inputs": [{"name": source.name, "bytes": source.size} for source in order.sources],
    }
    if started_plan is not None and started_plan != plan:
        raise UserError(
            f"{order.out} was begun {_difference(started_plan, plan)}; take another --out, or remove it first"
        )
    if (order.out / MANIFEST).is_file():
        return read_prepared(order.out), False
    (order.out / UNFINISHED).mkdir(parents=True, exist_ok=True)
    if tokenizer.text is not None:
        write_text(order.out / TOKENIZER, tokenizer.text)
    write_json(order.out / UNFINISHED / PLAN, plan)
    records = sorted(_records(order, settings, tokenizer), key=lambda record: record.number)
    within_lines = sum(record.separators for record in records)
    if within_lines and within_lines >= sum(
        split.documents for record in records for split in record.splits.values()
    ):
        say(
            f"note: {order.separator} stands {within_lines:,} times within lines, where it ends no document; "
            "a document ends with a line of its own (--separator)"
        )
    content = manifest(records, tokenizer=tokenizer, file=TOKENIZER, plan=plan)
    write_text(order.out / MANIFEST, json.dumps(content, indent=1) + "\n")
    prepared = read_prepared(order.out)
    _cache_facts(prepared, records)
    shutil.rmtree(order.out / UNFINISHED)
    return prepared, True


def _check_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; --out takes a folder")
    own_files = (out / MANIFEST, out / UNFINISHED)
    if out.is_dir() and any(out.iterdir()) and not any(path.exists() for path in own_files):
        raise UserError(
            f"{out} holds something else; --out takes a new folder, or one that this command began"
        )


def _started_plan(out: Path) -> dict[str, Any] | None:
    """The plan of a folder with at least one finished part, else None."""
    if not (out / MANIFEST).is_file() and not any((out / UNFINISHED).glob("0*.json")):
        return None
    for file in (out / MANIFEST, out / UNFINISHED / PLAN):
        try:
            content = read_json(file, newest_format=FORMAT)
            return content["made_from"] if file.name == MANIFEST else content
        except FileNotFoundError:
            continue
        except (DamagedError, KeyError) as error:
            raise UserError(f"{file} is damaged ({error}); remove {out} and begin again") from error
    return None


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    if before.get("inputs") != now["inputs"]:
        return "from other inputs"
    old, new = before.get("settings", {}), now["settings"]
    key = next((key for key in new if old.get(key) != new[key]), "settings")
    return f"with {key} = {old.get(key)!r}, not {new.get(key)!r}"


def _tokenizer(order: PrepareOrder, *, started_plan: dict[str, Any] | None) -> Tokenizer:
    size = train_size(order.tokenizer)
    if size is None:
        return read_tokenizer(order.tokenizer, end=order.end, start=order.start)
    kept = order.out / TOKENIZER
    planned = (started_plan or {}).get("settings", {}).get("tokenizer")
    if planned == order.tokenizer and kept.is_file():
        return read_tokenizer(str(kept), end=order.end, start=order.start)
    say(f"training a BPE of {size} tokens")
    return train_tokenizer(_training_text(order), size=size)


def _training_text(order: PrepareOrder) -> Iterator[bytes]:
    """The first documents of every file, without those held out."""
    for source in order.sources:
        bytes_left = max(1, TRAIN_ON // len(order.sources))
        for part in parts([source], size=part_size([source]), separator=order.separator, field=order.field):
            for piece in part.pieces:
                for document, *_ in documents(piece, field=order.field, separator=order.separator):
                    if bytes_left > 0 and not is_held_out(document, share=order.validation_share):
                        bytes_left -= len(document)
                        yield document
            if bytes_left <= 0:
                break


def _records(order: PrepareOrder, settings: ShardSettings, tokenizer: Tokenizer) -> Iterator[PartRecord]:
    """The records of all parts, in order of completion."""
    progress = PrepareProgress(sum(source.size for source in order.sources))
    width = np.dtype(dtype_for(tokenizer.vocab_size)).itemsize
    existing: list[PartRecord] = []

    def unfinished_parts() -> Iterator[InputPart]:
        for part in parts(
            order.sources, size=part_size(order.sources), separator=order.separator, field=order.field
        ):
            if (record := finished_record(order.out, part.number, width=width)) is None:
                yield part
            else:
                existing.append(record)
                progress.done(part.read, 0)

    arguments = (tokenizer.text, settings, order.out, tokenizer.name, order.end)
    finished = (
        _in_this_process(unfinished_parts(), arguments)
        if order.workers == 1
        else _in_pool(unfinished_parts(), arguments, workers=order.workers)
    )
    for part, record in finished:
        progress.done(part.read, sum(split.tokens for split in record.splits.values()))
        yield record
    yield from existing


def _in_this_process(
    unfinished: Iterable[InputPart], arguments: tuple[Any, ...]
) -> Iterator[tuple[InputPart, PartRecord]]:
    start_worker(*arguments)
    for part in unfinished:
        yield part, tokenize_in_worker(part)


def _in_pool(
    unfinished: Iterator[InputPart], arguments: tuple[Any, ...], *, workers: int
) -> Iterator[tuple[InputPart, PartRecord]]:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker, initargs=arguments)
    running: dict[Future[PartRecord], InputPart] = {}
    try:
        more = True
        while more or running:
            # Few parts wait: they are held in memory.
            while more and len(running) < workers + 2:
                part = next(unfinished, None)
                more = part is not None
                if part is not None:
                    running[pool.submit(tokenize_in_worker, part)] = part
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process was killed (out of memory?); finished parts are kept: repeat the command, with fewer "
            "--workers if memory is short"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _cache_facts(prepared: Prepared, records: Sequence[PartRecord]) -> None:
    """Cache the shards' checksums and token bounds, so that the first run need not compute them."""
    splits = {split.file: split for record in records for split in record.splits.values() if split.file}
    for shard in (shard for shards in prepared.splits.values() for shard in shards):
        split = splits[shard.file.name]
        facts = ShardFacts(sha256=split.sha256, largest=split.largest, smallest=0)
        cache_facts(shard, facts, cache=cache_folder())
