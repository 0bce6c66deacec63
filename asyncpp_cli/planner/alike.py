"""What layouts of a run have in common, as keys under which it is remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import get_origin, get_type_hints

from stages.config.run_config import RunConfig
from stages.shape.partition import StageCut, first_alike


def alike_cuts(config: RunConfig, stages: Sequence[StageCut]) -> list[StageCut]:
    """For each stage, one with as many halves of each kind and the same ends of the model: it begins as early
    as it can, so that it is the same in many layouts."""
    cuts = first_alike(config.model, stages)
    alike = {id(cut): cut for cut in cuts}
    dense = 2 * config.model.dense_layers if config.model.experts else 0
    for key, cut in alike.items():
        if cut.halves.start >= dense:
            start = dense + cut.halves.start % 2
            alike[key] = replace(cut, halves=range(start, start + len(cut.halves)))
    return [alike[id(cut)] for cut in cuts]


_GEOMETRY = ("parallel.stages", "parallel.cut", "parallel.shard_head")
_TYPES = {
    f"{section}.{name}": kind
    for section, keys in get_type_hints(RunConfig).items()
    if section in ("model", "data", "train", "error_feedback", "correction", "site", "optimizer", "parallel")
    for name, kind in get_type_hints(keys).items()
    if f"{section}.{name}" not in _GEOMETRY
}
# A plan asks for these values thousands of times.
_hashable = attrgetter(*(name for name, kind in _TYPES.items() if get_origin(kind) is not Mapping))
_dicts = attrgetter(*(name for name, kind in _TYPES.items() if get_origin(kind) is Mapping))


class Settings:
    """A configuration as key of a cache: equal to others that differ in schedule, stages and cut alone."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._key = (_hashable(config), repr(_dicts(config)))
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self._key == other._key


remembered = lru_cache(maxsize=4096)
