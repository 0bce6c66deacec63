"""Reads weights from a run's checkpoints, a few parameters at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from optimizers.corrections.base import Correction, PlainUpdate
from optimizers.corrections.error_feedback import build_error_feedback
from stages.checkpoint import files
from stages.checkpoint.export_options import Weights
from stages.checkpoint.files import CheckpointError
from stages.checkpoint.reader import CheckpointReader
from stages.checkpoint.state import Saved
from stages.config import RunConfig

_STATE_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Exceptions that a correction may raise for the state of another correction."""


class SavedWeights:
    """The weights of one checkpoint.

    Args:
        folder: a valid checkpoint (see `newest_checkpoint`).
        config: the run's configuration.

    Raises:
        CheckpointError: `folder` is not a checkpoint.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        state = files.read_state(folder)
        self.step = int(state["step"])
        self._newest = max(state["versions"])
        self._config = config
        self._reader = CheckpointReader(folder)
        self._sizes = self._reader.sizes()
        self._saved = Saved(self._sizes, state["stages"])

    @property
    def names(self) -> set[str]:
        """Names of the parameters."""
        return self._names_under("master/")

    @property
    def biases(self) -> set[str]:
        """Names of the balance biases."""
        return self._names_under(f"version/{self._newest}/") - self.names

    def _names_under(self, prefix: str) -> set[str]:
        return {key.removeprefix(prefix) for key in self._sizes if key.startswith(prefix)}

    def size(self, name: str, weights: Weights) -> tuple[torch.Size, torch.dtype]:
        """Shape and type of a parameter or balance bias.

        Raises:
            CheckpointError: the checkpoint has no parameter of that name.
        """
        key = self._key(name, weights)
        if key not in self._sizes:
            raise CheckpointError(f"{key} is not in it")
        return self._sizes[key]

    def read(self, names: Iterable[str], weights: Weights) -> dict[str, Tensor]:
        """The values of some parameters and balance biases, by name.

        Raises:
            CheckpointError: the checkpoint lacks one of the parameters.
        """
        keys = {name: self._key(name, weights) for name in names}
        read = self._read(keys.values())
        tensors = {name: read[key] for name, key in keys.items()}
        if weights is Weights.WORKING:
            return tensors
        biases = self.biases
        return {
            name: tensor if name in biases else self._evaluated(name, tensor)
            for name, tensor in tensors.items()
        }

    def _key(self, name: str, weights: Weights) -> str:
        master = weights is Weights.MASTER and f"master/{name}" in self._sizes
        return f"master/{name}" if master else f"version/{self._newest}/{name}"

    def _read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        into = {}
        for key in keys:
            if key not in self._sizes:
                raise CheckpointError(f"{key} is not in it")
            shape, dtype = self._sizes[key]
            into[key] = torch.empty(shape, dtype=dtype)
        self._reader.read(into)
        return into

    def _evaluated(self, name: str, master: Tensor) -> Tensor:
        correction: Correction = PlainUpdate()
        # With error feedback alone the evaluation weights may differ from the master copy.
        if self._config.correction.name == "none":
            feedback = self._config.error_feedback
            correction = build_error_feedback(
                coefficient=feedback.coefficient, form=feedback.form, decay_at=feedback.decay_at
            )
            kept = self._read(self._saved.correction_keys([name]))
            try:
                correction.load_state_dict(self._saved.correction_state([name], kept))
                [evaluated] = correction.evaluation_weights([master])
            except _STATE_ERRORS as error:
                raise CheckpointError(f"what the correction keeps of {name} is not of its form") from error
            return evaluated
        [evaluated] = correction.evaluation_weights([master])
        return evaluated


def newest_checkpoint(checkpoints: Path, *, step: int | None) -> Path:
    """The folder of the newest valid checkpoint, or of the one of `step`.

    Damaged checkpoints are skipped with a warning on standard error.

    Raises:
        CheckpointError: there is no valid checkpoint, or the one of `step` is damaged.
    """
    steps = files.saved_steps(checkpoints)
    if not steps:
        raise CheckpointError(f"{checkpoints} holds no checkpoint")
    if step is not None and step not in steps:
        available = ", ".join(str(saved) for saved in reversed(steps))
        raise CheckpointError(
            f"{checkpoints} holds no checkpoint of step {step}; there are those of {available}"
        )
    for saved in steps if step is None else [step]:
        folder = files.folder_of(checkpoints, saved)
        try:
            wrong = files.damage(folder, sorted(files.read_manifest(folder).items()))
        except CheckpointError as error:
            wrong = str(error)
        if wrong is None:
            return folder
        if step is not None:
            raise CheckpointError(f"checkpoint {folder} is damaged: {wrong}")
        print(f"warning: checkpoint {folder} is not used: {wrong}", file=sys.stderr, flush=True)
    raise CheckpointError(f"{checkpoints} holds no checkpoint that is whole")
