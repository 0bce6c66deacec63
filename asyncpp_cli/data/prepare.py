"""`asyncpp data prepare`: inputs become a folder of token shards with a manifest, in parallel processes."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncpp_cli.base.atomic_files import new_folder, real_folder, write_text
from asyncpp_cli.base.console import say
from asyncpp_cli.base.errors import UserError
from asyncpp_cli.base.progress import shown
from asyncpp_cli.data.documents import documents, exact_share
from asyncpp_cli.data.options import PrepareOptions
from asyncpp_cli.data.parts import InputPart, part_size, parts
from asyncpp_cli.data.sources import Source
from asyncpp_cli.data.tokenizers import Tokenizer, read_tokenizer, sha256_of
from asyncpp_cli.data.worker import PartRecord, ShardSettings, start_worker, tokenize
from stages.data.dataset import cache_folder
from stages.data.integrity import ShardFacts, cache_facts
from stages.data.prepared import FORMAT, MANIFEST, SPLITS, Prepared, read_prepared
from stages.data.shards import dtype_for
from stages.data.text import entropy

TOKENIZER = "tokenizer.json"
COUNTED = 1 << 28
"""Most bytes of input of which the documents are counted before, to hold out as many as was asked for."""


@dataclass(frozen=True, kw_only=True)
class PrepareOrder(PrepareOptions):
    """The arguments of `asyncpp data prepare`."""

    sources: Sequence[Source]


def prepare_data(order: PrepareOrder) -> Prepared:
    """Prepare the data.

    Raises:
        UserError: an input or the tokenizer cannot be read, or the folder is not new.
    """
    tokenizer = read_tokenizer(order.tokenizer, end=order.end_of_document, start=order.start_of_document)
    settings = ShardSettings(
        tokenizer=tokenizer.name,
        tokenizer_sha256=sha256_of(tokenizer),
        end_of_document=tokenizer.end_of_document,
        start_of_document=tokenizer.start_of_document,
        field=order.field,
        separator=order.separator,
        validation_share=order.validation_share,
        hashes_held_out=_hashes_to_hold_out(order),
    )
    plan = {
        "settings": asdict(settings),
        "inputs": [{"name": source.name, "bytes": source.size} for source in order.sources],
    }
    out = real_folder(order.out)
    with new_folder(out) as folder:
        records = sorted(_records(order, settings, tokenizer, folder), key=lambda record: record.number)
        if tokenizer.text is not None:
            write_text(folder / TOKENIZER, tokenizer.text)
        content = manifest(records, tokenizer=tokenizer, file=TOKENIZER, plan=plan)
        write_text(folder / MANIFEST, json.dumps(content, indent=1) + "\n")
    _note_separators(records, order.separator)
    _note_changes(records)
    _note_share(records, order.validation_share)
    prepared = read_prepared(out)
    _cache_facts(prepared, records)
    return prepared


def _parts(order: PrepareOrder) -> Iterator[InputPart]:
    size = part_size(order.sources)
    return parts(order.sources, size=size, separator=order.separator, field=order.field)


def _hashes_to_hold_out(order: PrepareOrder) -> float:
    """The share of hashes to hold out: of large inputs that of the documents; of small ones, whose documents
    are counted, the one that holds out as many as was asked for."""
    if sum(source.size for source in order.sources) > COUNTED:
        return order.validation_share
    pieces = (piece for part in _parts(order) for piece in part.pieces)
    texts = (
        document.text
        for piece in pieces
        for document in documents(piece, field=order.field, separator=order.separator)
    )
    return exact_share(texts, share=order.validation_share)


def _note_share(records: Sequence[PartRecord], share: float) -> None:
    held_out, kept = (
        sum(record.splits[name].documents for record in records) for name in ("validation", "train")
    )
    if held_out and abs(held_out - share * (held_out + kept)) > max(1, share * (held_out + kept) / 10):
        say(
            f"note: {held_out:,} of {held_out + kept:,} documents are held out, "
            f"{held_out / (held_out + kept):.2%}, and not --validation-share {share:.2%}: "
            "their hashes decide, and copies stay together"
        )


def _note_separators(records: Sequence[PartRecord], separator: str) -> None:
    within_lines = sum(record.separators for record in records)
    if within_lines and within_lines >= sum(
        split.documents for record in records for split in record.splits.values()
    ):
        say(
            f"note: {separator} stands {within_lines:,} times within lines, where it ends no document; "
            "a document ends with a line of its own (--separator)"
        )


def _note_changes(records: Sequence[PartRecord]) -> None:
    splits = [split for record in records for split in record.splits.values()]
    if changed := sum(split.changed for split in splits):
        share = changed / sum(split.documents for split in splits)
        example = next(record.example for record in records if record.example)
        say(
            f"note: tokens of {share:.2%} of the documents do not decode to their text ({example}); bytes "
            "and bits per byte count what decoding gives back"
        )


def _records(
    order: PrepareOrder, settings: ShardSettings, tokenizer: Tokenizer, folder: Path
) -> Iterator[PartRecord]:
    """The records of all parts, in order of completion."""
    inputs = _parts(order)
    arguments = (tokenizer.text, settings, folder, tokenizer.name, order.end_of_document)
    finished = (
        _in_this_process(inputs, arguments)
        if order.workers == 1
        else _in_pool(inputs, arguments, workers=order.workers or 1)
    )
    with shown("tokenizing", total=sum(source.size for source in order.sources)) as advance:
        for part, record in finished:
            advance(part.read)
            yield record


def _in_this_process(
    inputs: Iterable[InputPart], arguments: tuple[Any, ...]
) -> Iterator[tuple[InputPart, PartRecord]]:
    start_worker(*arguments)
    for part in inputs:
        yield part, tokenize(part)


def _in_pool(
    inputs: Iterator[InputPart], arguments: tuple[Any, ...], *, workers: int
) -> Iterator[tuple[InputPart, PartRecord]]:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker, initargs=arguments)
    running: dict[Future[PartRecord], InputPart] = {}
    try:
        more = True
        while more or running:
            # Few parts wait: they are held in memory.
            while more and len(running) < workers + 2:
                part = next(inputs, None)
                more = part is not None
                if part is not None:
                    running[pool.submit(tokenize, part)] = part
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process was killed (out of memory?): repeat the command, with fewer --workers"
        ) from error
    except RuntimeError:
        # Where no thread can be started, the pool neither ends its processes nor shuts down.
        for process in multiprocessing.active_children():
            process.kill()
        raise
    finally:
        with suppress(RuntimeError):
            pool.shutdown(wait=True, cancel_futures=True)


def _cache_facts(prepared: Prepared, records: Sequence[PartRecord]) -> None:
    """Cache the shards' checksums and token bounds, so that the first run need not compute them."""
    splits = {split.file: split for record in records for split in record.splits.values() if split.file}
    for shard in (shard for shards in prepared.splits.values() for shard in shards):
        split = splits[shard.file.name]
        facts = ShardFacts(sha256=split.sha256, largest=split.largest, smallest=0)
        cache_facts(shard, facts, cache=cache_folder())


def manifest(
    records: Sequence[PartRecord], *, tokenizer: Tokenizer, file: str, plan: Mapping[str, Any]
) -> dict[str, Any]:
    """The manifest's content for the shards of all parts, in order.

    If no document was held out by chance, the end of the last shards is held out.

    Args:
        records: one for each part.
        tokenizer: that produced the tokens.
        file: name of the tokenizer's copy in the folder.
        plan: settings and inputs of the folder.

    Raises:
        UserError: the inputs hold no text.
    """
    splits = {name: _split(records, name) for name in SPLITS}
    counts = sum(np.asarray(record.splits["validation"].byte_counts) for record in records)
    if not any(split["tokens"] for split in splits.values()):
        raise UserError("the inputs hold no text")
    if not splits["train"]["tokens"]:
        raise UserError("all documents are held out; accepted: a smaller --validation-share")
    if not splits["validation"]["tokens"]:
        share = float(plan["settings"]["validation_share"])
        splits = _hold_out_end(splits["train"], share=share)
        counts = sum(np.asarray(record.splits["train"].byte_counts) for record in records)
    return {
        "format": FORMAT,
        "vocab_size": tokenizer.vocab_size,
        "dtype": dtype_for(tokenizer.vocab_size),
        "tokenizer": {
            "name": tokenizer.name,
            "file": file if tokenizer.text is not None else None,
            "sha256": sha256_of(tokenizer),
            "end_of_document": tokenizer.end_of_document,
            "start_of_document": tokenizer.start_of_document,
        },
        "unigram_bits_per_byte": entropy(np.asarray(counts)),
        "splits": splits,
        "made_from": dict(plan),
    }


def _split(records: Sequence[PartRecord], name: str) -> dict[str, Any]:
    parts = [record.splits[name] for record in records if record.splits[name].file]
    return {
        "documents": sum(part.documents for part in parts),
        "tokens": sum(part.tokens for part in parts),
        "bytes": sum(part.bytes for part in parts),
        "shards": [{"file": part.file, "tokens": part.tokens, "sha256": part.sha256} for part in parts],
    }


def _hold_out_end(train: Mapping[str, Any], *, share: float) -> dict[str, dict[str, Any]]:
    """Divide a split in two at a token; bytes are divided in proportion."""
    tokens = train["tokens"]
    kept = tokens - max(1, round(tokens * share))
    splits = {
        "train": {**train, "tokens": kept, "bytes": train["bytes"] * kept // tokens, "shards": []},
        "validation": {
            "documents": 0,
            "tokens": tokens - kept,
            "bytes": train["bytes"] - train["bytes"] * kept // tokens,
            "shards": [],
        },
    }
    before = 0
    for shard in train["shards"]:
        kept_here = min(shard["tokens"], max(0, kept - before))
        before += shard["tokens"]
        if kept_here:
            splits["train"]["shards"].append({**shard, "tokens": kept_here})
        if kept_here < shard["tokens"]:
            rest = {**shard, "first": kept_here, "tokens": shard["tokens"] - kept_here}
            splits["validation"]["shards"].append(rest)
    return splits
