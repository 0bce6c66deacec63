"""Costs measured by `asyncpp plan --measure`, read from its file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from asyncpp_cli.base.errors import UserError
from asyncpp_cli.planner.costs.roofline import ModelTimes, PartTimes
from stages.config.records import DamagedError, read_bytes
from stages.config.run_config import RunConfig
from stages.shape.families import describe
from stages.shape.moe import block_part
from stages.shape.spec import ModelPart, Parameter

FORMAT = 3
_MOST_BYTES = 1 << 24
_NOT_TIMED = frozenset(
    {"name", "layers", "rope_base", "norm_eps", "factory", "init", "init_sha256", "code_sha256"}
) | {
    "dense_layers",
    "route_scale",
    "balance",
    "balance_rate",
}
"""Keys of `model` that change no part's time."""


def conditions(config: RunConfig) -> dict[str, Any]:
    """The settings that a measurement is valid for."""
    shape = {
        field.name: getattr(config.model, field.name)
        for field in fields(config.model)
        if field.name not in _NOT_TIMED
    }
    return {
        "model": shape,
        "context": config.data.context,
        "precision": config.train.precision,
        "optimizer": config.optimizer.name,
        "compile": config.train.compile,
        **({"document_mask": True} if config.data.document_mask else {}),
        **({"cuda_graphs": True} if config.train.cuda_graphs else {}),
    }


@dataclass(frozen=True)
class Measured:
    """Measured costs. Messages are not measured: each takes the file's `message_seconds`."""

    file: Path
    content: Mapping[str, Any]

    @property
    def source(self) -> str:
        return f"{self.file} (measured)"

    @property
    def threads(self) -> int | None:
        """Cores of a rank; None: the times are those of a GPU."""
        return int(self.content["threads"]) if self.content["device"] == "cpu" else None

    def is_for(self, config: RunConfig) -> bool:
        """Whether it was measured with this configuration's shapes, optimizer and threads."""
        other_threads = self.threads is not None and self.threads != config.site.threads
        return not other_threads and next(self._differing(config), None) is None

    def parts(self, config: RunConfig) -> ModelTimes:
        """Times of the parts; a micro-batch size that was not measured is scaled from the nearest one."""
        self._check(config)
        size, model = config.train.microbatch_size, config.model
        kinds = [block_part(model, block) for block in range(model.layers)]
        if missing := set(kinds) - self.content["parts"].keys():
            raise UserError(f"--profile {self.file}: lacks {missing.pop()}, which this model has")
        times = {kind: self._part(kind, size) for kind in set(kinds)}
        return ModelTimes(
            embedding=self._part("embedding", size),
            blocks=tuple(times[kind] for kind in kinds),
            # Blocks are measured whole.
            halves=tuple(_share(times[kinds[n // 2]], share) for n, share in enumerate(half_shares(config))),
            head=self._part("head", size),
        )

    def update(self, config: RunConfig, parameters: Sequence[Parameter]) -> float:
        """The optimizer step: each part's time, scaled by the share of its parameters that is updated."""
        self._check(config)
        spec = describe(config.model)
        parts = (
            (ModelPart.EMBEDDING, spec.embedding),
            (ModelPart.HEAD, spec.head),
            # Of a dense block among blocks of experts, too: what an update costs follows the parameters.
            (ModelPart.BLOCK, spec.blocks[-1]),
        )
        seconds = 0.0
        for part, description in parts:
            count = sum(parameter.size for parameter in parameters if parameter.part is part)
            seconds += (
                count / description.parameter_count * float(self.content["parts"][part.value]["update"])
            )
        return seconds

    def reduction(self, config: RunConfig, parameters: int) -> float:
        """0: not measured."""
        return 0.0

    def beside_reduction(self, config: RunConfig, parameters: int) -> float:
        """0: not measured."""
        return 0.0

    def neighbours(self, config: RunConfig) -> str:
        """Those of the run: links were not measured."""
        return config.site.neighbours

    def message(self, config: RunConfig, sender: int, receiver: int) -> float:
        """`message_seconds` of the file."""
        return float(self.content["message_seconds"])

    def _part(self, name: str, size: int) -> PartTimes:
        measured: Mapping[str, Mapping[str, float]] = self.content["parts"][name]["microbatch"]
        nearest = min(
            map(int, measured), key=lambda measured_size: (abs(measured_size - size), measured_size)
        )
        times = measured[str(nearest)]
        return PartTimes(**{key: seconds * size / nearest for key, seconds in times.items()})

    def _check(self, config: RunConfig) -> None:
        for key, value in self._differing(config):
            raise UserError(
                f"--profile {self.file}: was measured with {key} {self.content['conditions'].get(key)}, "
                f"not {value}"
            )

    def _differing(self, config: RunConfig) -> Iterator[tuple[str, Any]]:
        """The conditions that it was not measured under."""
        measured = self.content["conditions"]
        for key, value in conditions(config).items():
            # Whether blocks are compiled by default follows from the device that was measured.
            if measured.get(key) != value and (key, value) != ("compile", None):
                yield key, value


def half_shares(config: RunConfig) -> list[float]:
    """For each half of a block, its share of the block's multiply-adds, 0..1."""
    spec, context = describe(config.model), config.data.context
    return [
        half.forward_multiply_adds(context=context)
        / spec.blocks[number // 2].forward_multiply_adds(context=context)
        for number, half in enumerate(spec.halves)
    ]


def _share(times: PartTimes, share: float) -> PartTimes:
    return PartTimes(**{key: seconds * share for key, seconds in vars(times).items()})


def read_profile(file: Path) -> Measured:
    """Read a file that `asyncpp plan --measure` wrote.

    Raises:
        UserError: the file cannot be read or has another format.
    """
    try:
        content = json.loads(read_bytes(file, most=_MOST_BYTES))
        measured = Measured(file, content)
        if content["format"] != FORMAT:
            raise UserError(f"--profile {file}: has format {content['format']}, accepted: {FORMAT}")
        for name in ("embedding", "block", "head"):
            measured._part(name, 1)
        float(content["message_seconds"])
        str(content["device"]), int(content["threads"])
        dict(content["conditions"])
    except FileNotFoundError as error:
        raise UserError(f"--profile {file}: cannot be read ({error.strerror})") from error
    except DamagedError as error:
        raise UserError(f"--profile {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"--profile {file}: is not a file of `asyncpp plan --measure` ({error!r})") from error
    return measured
