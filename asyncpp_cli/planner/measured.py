"""Costs that `asyncpp profile` has measured: the file, and what is read from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from asyncpp_cli.errors import UserError
from asyncpp_cli.planner.parts import Part, Parts
from stages.config import ModelConfig, RunConfig

FORMAT = 2
_SHAPE = ("layers", "width", "heads", "kv_heads", "mlp_width", "vocab_size")


def conditions(config: RunConfig) -> dict[str, Any]:
    """What a measurement holds for."""
    model = asdict(config.model)
    shape = {key: model[key] for key in _SHAPE if key != "layers"}
    return {
        "model": shape,
        "context": config.data.context,
        "precision": config.train.precision,
        "optimizer": config.optimizer.name,
        "compile": config.train.compile,
    }


@dataclass(frozen=True)
class Measured:
    """Costs as measured. What is sent between processes is not: it counts as `message_seconds`."""

    file: Path
    content: Mapping[str, Any]

    @property
    def source(self) -> str:
        return f"{self.file} (measured)"

    def parts(self, config: RunConfig) -> Parts:
        """The parts with the run's micro-batches; a size that was not measured is scaled from the nearest."""
        self._check(config)
        embedding, block, head = (
            self._part(name, config.train.microbatch_size) for name in ("embedding", "block", "head")
        )
        return Parts(embedding=embedding, block=block, head=head)

    def update(self, config: RunConfig, shapes: Mapping[str, tuple[int, ...]]) -> float:
        """The optimizer step: a part's, in proportion to its parameters that are here."""
        self._check(config)
        here = {"embedding": 0, "head": 0, "block": 0}
        for name, shape in shapes.items():
            kind = name.partition(".")[0]
            here["head" if kind == "norm" else "block" if kind == "blocks" else kind] += prod(shape)
        whole = _parameters(config.model)
        parts = self.content["parts"]
        return sum(count / whole[name] * float(parts[name]["update"]) for name, count in here.items())

    def reduction(self, config: RunConfig, parameters: int) -> float:
        """Not measured: counted as nothing."""
        return 0.0

    def message(self, config: RunConfig) -> float:
        """As the file says."""
        return float(self.content["message_seconds"])

    def _part(self, name: str, size: int) -> Part:
        measured: Mapping[str, Mapping[str, float]] = self.content["parts"][name]["microbatch"]
        nearest = min(map(int, measured), key=lambda there: (abs(there - size), there))
        times = measured[str(nearest)]
        return Part(**{key: seconds * size / nearest for key, seconds in times.items()})

    def _check(self, config: RunConfig) -> None:
        wanted, there = conditions(config), self.content["conditions"]
        for key, value in wanted.items():
            if there.get(key) != value:
                raise UserError(
                    f"--profile {self.file}: was measured with {key} {there.get(key)}, not {value}"
                )


def _parameters(model: ModelConfig) -> dict[str, int]:
    kv_width = model.kv_heads * (model.width // model.heads)
    table = model.vocab_size * model.width
    block = 2 * model.width * (model.width + kv_width + 1) + 3 * model.width * model.mlp_width
    return {"embedding": table, "block": block, "head": table + model.width}


def read_profile(file: Path) -> Measured:
    """The costs in a file that `asyncpp profile` wrote.

    Raises:
        UserError: it is none.
    """
    try:
        content = json.loads(file.read_bytes())
        measured = Measured(file, content)
        if content["format"] != FORMAT:
            raise UserError(f"--profile {file}: has format {content['format']}, accepted: {FORMAT}")
        for name in ("embedding", "block", "head"):
            measured._part(name, 1)
        float(content["message_seconds"])
        dict(content["conditions"])
    except OSError as error:
        raise UserError(f"--profile {file}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--profile {file}: is not a file of `asyncpp profile` ({error!r})") from error
    return measured
