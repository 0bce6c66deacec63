"""`asyncpp data prepare`: inputs to a folder of token shards with a manifest, by as many processes as wanted.

A folder that is not finished holds `unfinished/`: the plan, and a record of each part that is done. The same
command goes on from there.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from asyncpp_cli.data import work
from asyncpp_cli.data.documents import documents, is_held_out
from asyncpp_cli.data.manifest import manifest
from asyncpp_cli.data.parts import Part, part_size, parts
from asyncpp_cli.data.sources import Source
from asyncpp_cli.data.tokenizers import Tokenizer, read_tokenizer, sha256_of, train_size, train_tokenizer
from asyncpp_cli.data.work import Record, Settings
from asyncpp_cli.errors import UserError
from asyncpp_cli.files import write_json, write_text
from stages.corpus import cache_folder
from stages.prepared import MANIFEST, UNFINISHED, Prepared, read_prepared
from stages.shard_check import Known, remember
from stages.shards import dtype_for

TOKENIZER = "tokenizer.json"
PLAN = "plan.json"
TRAIN_ON = 1 << 27
"""Bytes of text that a tokenizer is trained on, at most; every file gives an equal share, its beginning."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is wanted."""

    sources: Sequence[Source]
    tokenizer: str
    end: str | None
    """End-of-document token, where the user names it."""
    field: str
    separator: str
    validation_share: float
    out: Path
    workers: int


class Progress(Protocol):
    """Who is told how far it is."""

    def say(self, message: str) -> None: ...

    def begin(self, size: int) -> None:
        """`size` bytes of input are to be read."""

    def done(self, read: int, tokens: int) -> None:
        """A part of `read` bytes of input is complete, and gave `tokens`."""


def prepare(order: Order, progress: Progress) -> tuple[Prepared, bool]:
    """Carry out an order, or what is left of it. The result, and whether there was anything to do.

    Raises:
        UserError: an input or the tokenizer cannot be read, or the folder holds something else.
        KeyboardInterrupt: what is finished stays.
    """
    _claim(order.out)
    begun = _begun(order.out)
    tokenizer = _tokenizer(order, progress, begun=begun)
    settings = Settings(
        tokenizer=order.tokenizer if train_size(order.tokenizer) is not None else tokenizer.name,
        tokenizer_sha256=sha256_of(tokenizer),
        end_of_document=tokenizer.end_of_document,
        field=order.field,
        separator=order.separator,
        validation_share=order.validation_share,
    )
    plan = {
        "settings": asdict(settings),
        "inputs": [{"name": source.name, "bytes": source.size} for source in order.sources],
    }
    if begun is not None and begun != plan:
        raise UserError(
            f"{order.out} was begun {_difference(begun, plan)}; take another --out, or remove it first"
        )
    if (order.out / MANIFEST).is_file():
        return read_prepared(order.out), False
    (order.out / UNFINISHED).mkdir(parents=True, exist_ok=True)
    if tokenizer.text is not None:
        write_text(order.out / TOKENIZER, tokenizer.text)
    write_json(order.out / UNFINISHED / PLAN, plan)
    progress.begin(sum(source.size for source in order.sources))
    records = sorted(_records(order, settings, tokenizer, progress), key=lambda record: record.number)
    content = manifest(records, tokenizer=tokenizer, file=TOKENIZER, plan=plan)
    write_text(order.out / MANIFEST, json.dumps(content, indent=1) + "\n")
    prepared = read_prepared(order.out)
    _remember(prepared, records)
    shutil.rmtree(order.out / UNFINISHED)
    return prepared, True


def _claim(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; --out takes a folder")
    ours = (out / MANIFEST, out / UNFINISHED)
    if out.is_dir() and any(out.iterdir()) and not any(path.exists() for path in ours):
        raise UserError(
            f"{out} holds something else already; --out takes a new folder, or one that was begun"
        )


def _begun(out: Path) -> dict[str, Any] | None:
    """The plan of a folder that is finished, or of which a part is."""
    if not (out / MANIFEST).is_file() and not any((out / UNFINISHED).glob("0*.json")):
        return None
    for file in (out / MANIFEST, out / UNFINISHED / PLAN):
        try:
            content: dict[str, Any] = json.loads(file.read_bytes())
            return content["made_from"] if file.name == MANIFEST else content
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} is damaged ({error}); remove {out} and begin again") from error
    return None


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    if before.get("inputs") != now["inputs"]:
        return "from other inputs"
    old, new = before.get("settings", {}), now["settings"]
    key = next((key for key in new if old.get(key) != new[key]), "settings")
    return f"with {key} = {old.get(key)!r}, not {new.get(key)!r}"


def _tokenizer(order: Order, progress: Progress, *, begun: dict[str, Any] | None) -> Tokenizer:
    size = train_size(order.tokenizer)
    if size is None:
        return read_tokenizer(order.tokenizer, end=order.end)
    kept = order.out / TOKENIZER
    if begun is not None and begun.get("settings", {}).get("tokenizer") == order.tokenizer and kept.is_file():
        return read_tokenizer(str(kept), end=order.end)
    progress.say(f"training a BPE of {size} tokens")
    return train_tokenizer(_training_text(order), size=size)


def _training_text(order: Order) -> Iterator[bytes]:
    """Documents that are not held out: the first of every file."""
    for source in order.sources:
        left = max(1, TRAIN_ON // len(order.sources))
        for part in parts([source], size=part_size([source]), separator=order.separator, field=order.field):
            for piece in part.pieces:
                for document in documents(piece, field=order.field, separator=order.separator):
                    if left > 0 and not is_held_out(document, share=order.validation_share):
                        left -= len(document)
                        yield document
            if left <= 0:
                break


def _records(order: Order, settings: Settings, tokenizer: Tokenizer, progress: Progress) -> Iterator[Record]:
    """The record of every part, as they are done."""
    width = np.dtype(dtype_for(tokenizer.vocab_size)).itemsize
    kept: list[Record] = []

    def to_do() -> Iterator[Part]:
        for part in parts(
            order.sources, size=part_size(order.sources), separator=order.separator, field=order.field
        ):
            if (record := work.finished(order.out, part.number, width=width)) is None:
                yield part
            else:
                kept.append(record)
                progress.done(part.read, 0)

    arguments = (tokenizer.text, settings, order.out, tokenizer.name, order.end)
    done = (
        _alone(to_do(), arguments)
        if order.workers == 1
        else _pooled(to_do(), arguments, workers=order.workers)
    )
    for part, record in done:
        progress.done(part.read, sum(split.tokens for split in record.splits.values()))
        yield record
    yield from kept


def _alone(to_do: Iterable[Part], arguments: tuple[Any, ...]) -> Iterator[tuple[Part, Record]]:
    work.begin(*arguments)
    for part in to_do:
        yield part, work.tokenize_here(part)


def _pooled(
    to_do: Iterator[Part], arguments: tuple[Any, ...], *, workers: int
) -> Iterator[tuple[Part, Record]]:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=work.begin, initargs=arguments)
    running: dict[Future[Record], Part] = {}
    try:
        more = True
        while more or running:
            # A part waits for every process, no more: parts are held in memory.
            while more and len(running) < workers + 2:
                part = next(to_do, None)
                more = part is not None
                if part is not None:
                    running[pool.submit(work.tokenize_here, part)] = part
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process ended without a word (out of memory?); what is finished stays, and the same command "
            "goes on, with fewer --workers if need be"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _remember(prepared: Prepared, records: Sequence[Record]) -> None:
    """Spare the first run the reading of what has just been written."""
    known = {split.file: split for record in records for split in record.splits.values() if split.file}
    for shard in (shard for shards in prepared.splits.values() for shard in shards):
        split = known[shard.file.name]
        found = Known(sha256=split.sha256, largest=split.largest, smallest=0)
        remember(shard, found, cache=cache_folder())
