"""What a sweep tells about cells that can be trained, and may not be what their author meant."""

from __future__ import annotations

from collections.abc import Sequence

from asyncpp_cli.matrix import ResolvedCell
from stages.corpus import find_corpus
from stages.shards import count


def notes(cells: Sequence[ResolvedCell]) -> list[str]:
    """Remarks, each in one line, on cells that have been checked."""
    found: dict[str, None] = {}
    lengths: dict[tuple[str | None, float], int] = {}
    for config in (resolved.config for resolved in cells):
        key = (config.data.path, config.data.validation_share)
        if key not in lengths:
            lengths[key] = count(find_corpus(config.data).validation)
        sequences = config.train.eval_microbatches * config.train.microbatch_size
        drawn = sequences * config.data.context
        if drawn > lengths[key]:
            where = config.data.path or "the Python standard library"
            found[
                f"the validation split of {where} has {lengths[key]:,} tokens, and an evaluation reads "
                f"{drawn:,} ({sequences} sequences of {config.data.context}): they overlap; "
                "train.eval_microbatches says how many it reads"
            ] = None
    return list(found)
