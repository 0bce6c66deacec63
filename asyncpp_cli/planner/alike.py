"""What layouts of a run have in common, as keys under which it is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

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


class Settings:
    """A configuration as key of a cache: equal to others that differ in schedule, stages and cut alone."""

    _GEOMETRY = ("stages", "cut", "shard_head")

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        own = (config.model, config.data, config.train, config.error_feedback, config.correction, config.site)
        values = [value for section in (*own, config.optimizer) for value in vars(section).values()]
        self._key = (
            *(repr(value) if isinstance(value, dict | list) else value for value in values),
            *(value for name, value in vars(config.parallel).items() if name not in self._GEOMETRY),
        )
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self._key == other._key


remembered = lru_cache(maxsize=4096)
