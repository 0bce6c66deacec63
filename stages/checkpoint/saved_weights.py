"""Reads weights from a run's checkpoints, a few parameters at a time."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from optimizers.corrections.base import build_stage_correction
from optimizers.corrections.catalogue import correction_named
from stages.checkpoint import files
from stages.checkpoint.export_options import Weights
from stages.checkpoint.files import CheckpointError, FormatError, Owner
from stages.checkpoint.state import STATE_ERRORS, Saved, shown
from stages.checkpoint.tensors import CheckpointReader, Form
from stages.config.run_config import RunConfig, chosen_correction
from stages.config.segments import segment_program
from stages.shape.families import describe
from stages.shape.head import whole_name
from stages.weights.number_formats import dtypes


class SavedWeights:
    """The weights of one checkpoint.

    Args:
        folder: a checkpoint whose files match its manifest.
        config: the run's configuration.
        owners: the run, and others whose checkpoints it may have; empty: any that fits.

    Raises:
        CheckpointError: `folder` is not a checkpoint of this run.
    """

    def __init__(self, folder: Path, config: RunConfig, *, owners: Sequence[Owner] = ()) -> None:
        index = files.read_index(folder)
        files.check_owner(index, owners)
        self.step = index.step
        self._newest = max(index.versions)
        self._config = config
        self._reader = CheckpointReader(folder, index)
        self._forms = self._reader.forms()
        self._saved = Saved(self._forms, index.stages)
        if config.model.factory is None:
            spec = describe(config.model)
            members = {member.name: member.shape for whole in spec.whole() for member in whole.members()}
            biases = {bias.name: bias.shape for bias in spec.biases()}
        else:
            saved = {name for stage in index.stages for name in stage.parameters}
            members = {name: tuple(self._forms[f"master/{name}"][0]) for name in saved}
            biases = {}
        self.names = members.keys()
        """Names of the parameters."""
        self.biases = biases.keys()
        """Names of the balance biases."""
        self._check(index.versions, members, biases)
        if missing := self.names - {whole_name(name) for stage in index.stages for name in stage.parameters}:
            raise CheckpointError(f"the state of {min(missing)} is not in it")
        # Whether the corrections' states fit shows when they are used: at one parameter of each stage.
        for name in {whole_name(name) for stage in index.stages for name in stage.parameters[:1]}:
            self.read([name], Weights.MASTER)

    def _check(
        self,
        saved_versions: Collection[int],
        members: Mapping[str, tuple[int, ...]],
        biases: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Compare versions, and each weight's name, shape and type, with those of the run."""
        versions = segment_program(self._config, first_step=self.step, steps=1).initial_versions
        if sorted(saved_versions) != sorted(versions):
            raise CheckpointError(
                f"it has weight versions {sorted(saved_versions)}, the run has {sorted(versions)} then"
            )
        types = dtypes(self._config)
        expected = {f"master/{name}": (torch.Size(shape), types.master) for name, shape in members.items()}
        for version in versions:
            for shapes, dtype in ((members, types.replica), (biases, torch.float32)):
                expected |= {
                    f"version/{version}/{name}": (torch.Size(shape), dtype) for name, shape in shapes.items()
                }
        for key, form in expected.items():
            if key not in self._forms:
                raise CheckpointError(f"{key} is not in it")
            if self._forms[key] != form:
                raise CheckpointError(
                    f"{key} was saved as {shown(self._forms[key])}, the run has {shown(form)}"
                )
        weights = {key for key in self._forms if key.startswith(("master/", "version/"))}
        if unknown := weights - expected.keys():
            raise CheckpointError(f"{min(unknown)} is in it, which the run's model does not have")

    def size(self, name: str, weights: Weights) -> Form:
        """Shape and type of a parameter or balance bias.

        Raises:
            CheckpointError: the average is asked for, and there is none.
        """
        return self._forms[self._key(name, weights)]

    def read(self, names: Iterable[str], weights: Weights) -> dict[str, Tensor]:
        """The values of some parameters and balance biases, by name.

        Raises:
            CheckpointError: a file is not what the checkpoint's index says, or it has no average.
        """
        keys = {name: self._key(name, weights) for name in names}
        read = self._read(keys.values())
        tensors = {name: read[key] for name, key in keys.items()}
        if weights is not Weights.MASTER:
            return tensors
        return {
            name: tensor if name in self.biases else self._evaluated(name, tensor)
            for name, tensor in tensors.items()
        }

    def _key(self, name: str, weights: Weights) -> str:
        if weights is Weights.WORKING or name in self.biases:
            return f"version/{self._newest}/{name}"
        if weights is Weights.MASTER:
            return f"master/{name}"
        average = f"correction/average/{name}"
        if self._config.train.ema_decay is None:
            raise CheckpointError("the run keeps no average of its weights (train.ema_decay: null)")
        if self._forms.get(average) != self._forms[f"master/{name}"]:
            raise CheckpointError(f"{average} is not in it in the form of {name}")
        return average

    def _read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        into = {}
        for key in keys:
            if key not in self._forms:
                raise CheckpointError(f"{key} is not in it")
            shape, dtype = self._forms[key]
            into[key] = torch.empty(shape, dtype=dtype)
        self._reader.read(into)
        return into

    def _evaluated(self, name: str, master: Tensor) -> Tensor:
        chosen = chosen_correction(self._config)
        if chosen is None or not correction_named(chosen[0]).evaluates_its_state:
            return master
        correction = build_stage_correction(chosen[0], options=chosen[1], delay=1, mismatch=0)
        kept = self._read(self._saved.correction_keys([name]))
        for key, tensor in kept.items():
            if (tensor.shape, tensor.dtype) != (master.shape, master.dtype):
                raise CheckpointError(f"{key} is not of the form of {name}")
        try:
            correction.load_state_dict(self._saved.correction_state([name], kept))
            [evaluated] = correction.evaluation_weights([master])
        except STATE_ERRORS as error:
            raise CheckpointError(f"what the correction keeps of {name} is not of its form") from error
        return evaluated


def newest_weights(
    checkpoints: Path, config: RunConfig, *, step: int | None = None, owners: Sequence[Owner] = ()
) -> SavedWeights:
    """The weights of the newest checkpoint that is whole and of this run, or of the one of `step`.

    Others are skipped with a warning on standard error. `config` and `owners` as in `SavedWeights`.

    Raises:
        CheckpointError: there is no such checkpoint, or the one of `step` is not.
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
            if wrong is None:
                return SavedWeights(folder, config, owners=owners)
        except FormatError as error:
            raise FormatError(f"checkpoint {folder} cannot be read: {error}") from error
        except CheckpointError as error:
            wrong = str(error)
        if step is not None:
            raise CheckpointError(f"checkpoint {folder} is damaged: {wrong}")
        print(f"warning: checkpoint {folder} is not used: {wrong}", file=sys.stderr, flush=True)
    raise CheckpointError(f"{checkpoints} holds no checkpoint that is whole and of this run")
