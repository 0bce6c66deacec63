"""The state of a stage as tensors by key, and a record of the rest.

    master/NAME                 the master copy
    version/V/NAME              a live weight version, its balance biases included
    optimizer/NAME/KEY          the optimizer's state of the parameter
    correction/PATH/NAME        the correction's state of the parameter

A NAME is that of a parameter, or of one matrix of a stack (`stages.shape.spec`). Keys contain neither
stages nor owners, so a run can resume with parameters on other stages and with other owners. Each owner saves
the state of its parameters; every data rank reads all weight versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from optimizers.custom import SAVED_SCALARS, OptimizerError, unsaved
from stages.checkpoint.files import (
    CheckpointError,
    CorrectionState,
    Parts,
    PerParameter,
    Scalar,
    StageRecord,
    Value,
)
from stages.checkpoint.tensors import Form, row_form
from stages.shape.head import split_name, whole_name
from stages.update.optimizer_step import StageState, UpdateState

STATE_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Exceptions that a correction may raise for the state of another correction."""
_SAME_STAGES = "go on with as many stages as saved it"


def pack(state: StageState, versions: Sequence[int]) -> tuple[dict[str, Tensor], StageRecord]:
    """A stage's state at a drain.

    Args:
        state: of the stage. The returned tensors are its own and must be copied before training continues.
        versions: weight versions that the next segment starts with.

    Returns:
        Tensors by key, and a record of the rest.

    Raises:
        RuntimeError: gradients wait for an update, so this is no drain.
        OptimizerError: the state of the optimizer contains something that cannot be saved.
        TypeError: that of the correction does.
    """
    weights = state.weights
    if any(buffer.versions for buffer in weights.gradients):
        raise RuntimeError("a checkpoint is wanted while gradients wait for an update")
    names, optimizer = weights.master.names, state.update.optimizer
    tensors: dict[str, Tensor] = {}
    others: dict[str, dict[str, Scalar]] = {}
    saved = {name for name in names if weights.saves(name)}
    for name, parameter in zip(names, weights.master.parameters, strict=True):
        if name not in saved:
            continue
        tensors[f"master/{name}"] = parameter.detach()
        kept = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in kept.items():
            if (what := unsaved(value)) is not None:
                raise OptimizerError(f"the optimizer keeps {key} of {name}, {what}, which cannot be saved")
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = value.detach()
            else:
                others.setdefault(name, {})[key] = value
    for version in versions:
        for name, member in zip(names, weights.owned_members(weights.replica_of(version)), strict=True):
            if name in saved:
                tensors[f"version/{version}/{name}"] = member.detach()
        for name, bias in weights.own_biases(weights.replica_of(version)).items():
            tensors[f"version/{version}/{name}"] = bias
    corrected: dict[str, Tensor] = {}
    correction = _pack_correction(state.update.correction.state_dict(), "correction", names, corrected)
    tensors |= {key: tensor for key, tensor in corrected.items() if key.rpartition("/")[2] in saved}
    record = StageRecord(
        parameters=[name for name in names if name in saved],
        updates=state.update.taken,
        optimizer=others,
        correction=correction,
    )
    return tensors, record


def _described(value: object) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _pack_correction(
    value: Any, path: str, names: Sequence[str], tensors: dict[str, Tensor]
) -> CorrectionState:
    """The record of a part of a correction's state; its tensors of parameters are added to `tensors`."""
    if isinstance(value, Mapping):
        parts = {key: _pack_correction(part, f"{path}/{key}", names, tensors) for key, part in value.items()}
        return Parts(parts=parts)
    if isinstance(value, SAVED_SCALARS):
        return Value(value=value)
    if (
        isinstance(value, list)
        and len(value) in (0, len(names))
        and all(isinstance(t, Tensor) for t in value)
    ):
        tensors.update({f"{path}/{name}": t for name, t in zip(names, value, strict=False)})
        return PerParameter(present=bool(value))
    raise TypeError(f"{path}, {_described(value)} of the correction, cannot be saved")


class Saved:
    """The state in a checkpoint, from which each stage takes its part.

    Args:
        forms: shape and type of each saved tensor, by key; of what was saved in shards, of the whole.
        stages: the records of `pack`, one for each stage that saved.
    """

    def __init__(self, forms: Mapping[str, Form], stages: Sequence[StageRecord]) -> None:
        self._forms = forms
        self._stages = stages
        self._held = [set(map(whole_name, stage.parameters)) for stage in stages]
        self._own_scalars: dict[str, dict[str, Scalar]] = {}
        for stage in stages:
            for name, scalars in stage.optimizer.items():
                self._own_scalars.setdefault(whole_name(name), {}).update(scalars)
        self._optimizer_keys: dict[str, list[str]] = {}
        for key in forms:
            kind, _, rest = key.partition("/")
            if kind == "optimizer":
                name, _, own_key = rest.rpartition("/")
                self._optimizer_keys.setdefault(name, []).append(own_key)

    def targets(self, state: StageState, versions: Sequence[int], expected: UpdateState) -> dict[str, Tensor]:
        """The tensors to read the stage's state into, by key: its weights themselves, the tensors of the
        expected state of its optimizer, and new ones for the correction.

        Args:
            state: of the stage.
            versions: weight versions that its next segment starts with.
            expected: state of its optimizer and its correction after `updates` steps.

        Raises:
            CheckpointError: the saved state is not what the stage has after as many steps: a tensor or a
                scalar is missing, one too many, or has another shape or type. The state of a user's own
                optimizer is taken as it was saved: what it keeps may change with its steps.
        """
        weights = state.weights
        into: dict[str, Tensor] = {}
        for replica, version in zip(weights.replicas, versions, strict=False):
            into |= weights.version_targets(replica, version)
        if len(versions) > len(weights.replicas):
            raise CheckpointError(f"versions {list(versions)} were saved; this stage holds fewer replicas")
        names, parameters = weights.master.names, weights.master.parameters
        for name, parameter, own in zip(names, parameters, expected.optimizer, strict=True):
            into[f"master/{name}"] = parameter.detach()
            if expected.closed:
                into.update(self._optimizer_targets(name, own))
            else:
                into.update(self._own_targets(name, own, parameter.device))
        if names:
            into.update(self._correction_targets(state, expected))
        for key, tensor in into.items():
            saved, wanted = self._form(key), (tensor.shape, tensor.dtype)
            if saved != wanted:
                raise CheckpointError(f"{key} was saved as {shown(saved)}, this run has {shown(wanted)}")
        return into

    def _optimizer_targets(self, name: str, expected: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        tensors, scalars = set(self._optimizer_keys.get(whole_name(name), ())), self._scalars(name)
        for key, value in expected.items():
            path = f"optimizer/{name}/{key}"
            if isinstance(value, Tensor):
                yield path, value
            elif key not in scalars or type(scalars[key]) is not type(value):
                raise CheckpointError(f"{path} is not in it as {_described(value)}")
        if unknown := (tensors | scalars.keys()) - expected.keys():
            raise CheckpointError(
                f"optimizer/{name}/{min(unknown)} is in it, which the optimizer of this run does not keep"
            )

    def _own_targets(
        self, name: str, expected: Mapping[str, Any], device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """Tensors for all that a user's own optimizer has saved of a parameter: of the layout and on the
        device that its first steps give them, if these make some of the same form."""
        for key in self._optimizer_keys.get(whole_name(name), ()):
            path, made = f"optimizer/{name}/{key}", expected.get(key)
            shape, dtype = self._form(path)
            if isinstance(made, Tensor) and (made.shape, made.dtype) == (shape, dtype):
                yield path, torch.empty_like(made)
            else:
                # Step counts that no step of this process has made stay on the CPU.
                yield path, torch.empty(shape, dtype=dtype, device=device if shape else "cpu")

    def _correction_targets(self, state: StageState, expected: UpdateState) -> dict[str, Tensor]:
        master = state.weights.master
        saved = self._correction(master.names)
        _check_correction(saved, expected.correction, "correction")
        return {
            f"{path}/{name}": torch.empty_like(parameter, device="cpu")
            for path in _tensor_paths(saved, "correction")
            for name, parameter in zip(master.names, master.parameters, strict=True)
        }

    def take(self, state: StageState, expected: UpdateState, read: Mapping[str, Tensor]) -> None:
        """Restore optimizer and correction from the tensors of `targets`, which have been read.

        Raises:
            CheckpointError: the state is of another correction.
        """
        optimizer, master = state.update.optimizer, state.weights.master
        if optimizer is None:
            return
        names, parameters = master.names, master.parameters
        for name, parameter in zip(names, parameters, strict=True):
            kept: dict[str, Any] = dict(self._scalars(name))
            for key in self._optimizer_keys.get(whole_name(name), ()):
                kept[key] = read[f"optimizer/{name}/{key}"]
            if kept:
                optimizer.state[parameter] = kept
        device = parameters[0].device
        on_device = {key: tensor.to(device) for key, tensor in read.items() if key.startswith("correction/")}
        try:
            state.update.correction.load_state_dict(self.correction_state(names, on_device))
        except STATE_ERRORS as error:
            raise CheckpointError(f"the correction's state does not fit: {error}") from error
        state.update.taken = self.updates(names)

    def updates(self, names: Sequence[str]) -> int:
        """Steps that the optimizer has taken on these parameters.

        Raises:
            CheckpointError: not as many on all.
        """
        updates = {stage.updates for stage in self._records(names)} if names else {0}
        if len(updates) != 1:
            raise CheckpointError("its stages have taken different numbers of steps; " + _SAME_STAGES)
        return updates.pop()

    def correction_keys(self, names: Sequence[str]) -> list[str]:
        """Keys of the correction's tensors for these parameters."""
        paths = _tensor_paths(self._correction(names), "correction")
        return [key for path in paths for key in _keys(path, names)]

    def correction_state(self, names: Sequence[str], read: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """The correction's `state_dict` for these parameters, from the tensors of `correction_keys`."""
        state: Mapping[str, Any] = _unpack_correction(self._correction(names), "correction", names, read)
        return state

    def _correction(self, names: Sequence[str]) -> CorrectionState:
        """The correction's record of these parameters, on which the stages that saved them must agree."""
        first, *others = [stage.correction for stage in self._records(names)]
        if any(other != first for other in others):
            raise CheckpointError(f"its stages kept different states of their corrections; {_SAME_STAGES}")
        return first

    def _records(self, names: Sequence[str]) -> list[StageRecord]:
        """The records of the stages that saved these parameters."""
        wanted = set(map(whole_name, names))
        records = [
            stage for stage, own in zip(self._stages, self._held, strict=True) if not wanted.isdisjoint(own)
        ]
        if missing := wanted.difference(*self._held):
            raise CheckpointError(f"the state of {min(missing)} is not in it")
        return records

    def _scalars(self, name: str) -> dict[str, Scalar]:
        return self._own_scalars.get(whole_name(name), {})

    def _form(self, key: str) -> Form:
        whole, rows = split_name(key)
        if whole not in self._forms:
            raise CheckpointError(f"{key} is not in it")
        form = self._forms[whole]
        if rows is not None and form[0] and rows.stop > form[0][0]:
            raise CheckpointError(f"{whole} was saved as {shown(form)}, and {key} is not in it")
        return row_form(form, rows)


def shown(form: Form) -> str:
    """Shape and type, for people."""
    shape, dtype = form
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _check_correction(saved: CorrectionState, expected: Any, path: str) -> None:
    """Compare the form of a correction's saved state with that of this run's correction after as many
    updates."""
    match saved:
        case Parts() if isinstance(expected, Mapping) and saved.parts.keys() == expected.keys():
            for key, part in saved.parts.items():
                _check_correction(part, expected[key], f"{path}/{key}")
        case Value() if type(saved.value) is type(expected):
            # Flags and names follow from the run; counts and numbers differ.
            if isinstance(expected, (bool, str)) and saved.value != expected:
                raise CheckpointError(f"{path} was saved as {saved.value}, this run has {expected}")
        case PerParameter() if isinstance(expected, list):
            pass
        case _:
            raise CheckpointError(f"{path} is not what the correction of this run keeps")


def _keys(path: str, names: Sequence[str]) -> list[str]:
    return [f"{path}/{name}" for name in names]


def _tensor_paths(state: CorrectionState, path: str) -> list[str]:
    match state:
        case Parts():
            return [
                inner for key, part in state.parts.items() for inner in _tensor_paths(part, f"{path}/{key}")
            ]
        case PerParameter(present=True):
            return [path]
    return []


def _unpack_correction(
    state: CorrectionState, path: str, names: Sequence[str], read: Mapping[str, Tensor]
) -> Any:
    match state:
        case Parts():
            return {
                key: _unpack_correction(part, f"{path}/{key}", names, read)
                for key, part in state.parts.items()
            }
        case Value():
            return state.value
    return [read[key] for key in _keys(path, names)] if state.present else []
