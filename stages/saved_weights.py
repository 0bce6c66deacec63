"""The weights in a run's checkpoints, read without a process of the run, a few parameters at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from optimizers.corrections import Correction, PlainUpdate, build_correction
from stages import checkpoint_files as files
from stages.checkpoint_files import CheckpointError
from stages.checkpoint_reader import CheckpointReader
from stages.config import RunConfig
from stages.stage_state import Saved

_NOT_ITS_FORM = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What computing with a state raises that is not the correction's; its form is known to that alone."""


class Weights(StrEnum):
    """Which of a run's weights."""

    MASTER = "master"
    """Those that are evaluated: the master copy, in full precision, with the correction's part."""
    WORKING = "working"
    """The newest weights that the pipeline computes with, in their own precision."""


class SavedWeights:
    """The weights of one checkpoint.

    Args:
        folder: of the checkpoint, which must be whole (see `newest_checkpoint`).
        config: the run's.

    Raises:
        CheckpointError: it is no checkpoint.
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
        """Of the parameters."""
        return {key.partition("/")[2] for key in self._sizes if key.startswith("master/")}

    def size(self, name: str, weights: Weights) -> tuple[torch.Size, torch.dtype]:
        """Shape and type of a parameter.

        Raises:
            CheckpointError: there is none of that name.
        """
        key = self._key(name, weights)
        if key not in self._sizes:
            raise CheckpointError(f"{key} is not in it")
        return self._sizes[key]

    def read(self, names: Iterable[str], weights: Weights) -> dict[str, Tensor]:
        """The weights of some parameters, by name.

        Raises:
            CheckpointError: there is none of some name.
        """
        asked = list(names)
        read = self._read([self._key(name, weights) for name in asked])
        found = {name: read[self._key(name, weights)] for name in asked}
        if weights is Weights.WORKING:
            return found
        return {name: self._evaluated(name, master) for name, master in found.items()}

    def _key(self, name: str, weights: Weights) -> str:
        return f"master/{name}" if weights is Weights.MASTER else f"version/{self._newest}/{name}"

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
        # Of all corrections, only error feedback may keep the evaluated weights elsewhere than in the master.
        if self._config.correction.name == "none":
            feedback = self._config.error_feedback
            correction = build_correction(
                coefficient=feedback.coefficient, form=feedback.form, decay_at=feedback.decay_at
            )
            kept = self._read(self._saved.correction_keys([name]))
            try:
                correction.load_state_dict(self._saved.correction_state([name], kept))
                [evaluated] = correction.evaluation_weights([master])
            except _NOT_ITS_FORM as error:
                raise CheckpointError(f"what the correction keeps of {name} is not of its form") from error
            return evaluated
        [evaluated] = correction.evaluation_weights([master])
        return evaluated


def newest_checkpoint(checkpoints: Path, *, step: int | None) -> Path:
    """The folder of the newest whole checkpoint, or that of `step`.

    A damaged one is passed over with a warning on standard error.

    Raises:
        CheckpointError: there is none, or that of `step` is damaged.
    """
    steps = files.saved_steps(checkpoints)
    if not steps:
        raise CheckpointError(f"{checkpoints} holds no checkpoint")
    if step is not None and step not in steps:
        there = ", ".join(str(saved) for saved in reversed(steps))
        raise CheckpointError(f"{checkpoints} holds no checkpoint of step {step}; there are those of {there}")
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
