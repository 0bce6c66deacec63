"""The state of a stage as tensors by key, and the rest as JSON.

    master/NAME                 the master copy
    version/V/NAME              a live weight version, its balance biases included
    optimizer/NAME/KEY          the optimizer's state of the parameter
    correction/PATH/NAME        the correction's state of the parameter

A NAME is that of a parameter, or of one matrix of a stack (`stages.model.stacks`). Keys contain neither
stages nor owners, so a run can resume with parameters on other stages and with other owners. Each owner saves
the state of its parameters; every data rank reads all weight versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stages.checkpoint.files import CheckpointError
from stages.update.optimizer_step import StageState

_SCALARS = (bool, int, float, str, type(None))


def pack(state: StageState, versions: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A stage's state at a drain.

    Args:
        state: of the stage. The returned tensors are its own and must be copied before training continues.
        versions: weight versions that the next segment starts with.

    Returns:
        Tensors by key, and a record of the rest for JSON.

    Raises:
        RuntimeError: gradients wait for an update, so this is no drain.
        TypeError: the state of the optimizer or the correction contains something that cannot be saved.
    """
    weights = state.weights
    if any(buffer.versions for buffer in weights.gradients):
        raise RuntimeError("a checkpoint is wanted while gradients wait for an update")
    names, optimizer = weights.master.names, state.update.optimizer
    tensors: dict[str, Tensor] = {}
    others: dict[str, dict[str, Any]] = {}
    for name, parameter in zip(names, weights.master.parameters, strict=True):
        tensors[f"master/{name}"] = parameter.detach()
        kept = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in kept.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = value.detach()
            elif isinstance(value, _SCALARS):
                others.setdefault(name, {})[key] = value
            else:
                raise TypeError(f"the optimizer keeps {key}, a {type(value).__name__}, which cannot be saved")
    for version in versions:
        for name, member in zip(names, weights.owned_members(weights.replica_of(version)), strict=True):
            tensors[f"version/{version}/{name}"] = member.detach()
        for name, bias in weights.own_biases(weights.replica_of(version)).items():
            tensors[f"version/{version}/{name}"] = bias
    correction = _pack_correction(state.update.correction.state_dict(), "correction", names, tensors)
    return tensors, {"parameters": names, "optimizer": others, "correction": correction}


def _pack_correction(value: Any, path: str, names: Sequence[str], tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Mapping):
        return {
            "parts": {
                key: _pack_correction(part, f"{path}/{key}", names, tensors) for key, part in value.items()
            }
        }
    if isinstance(value, _SCALARS):
        return {"value": value}
    if (
        isinstance(value, list)
        and len(value) in (0, len(names))
        and all(isinstance(t, Tensor) for t in value)
    ):
        tensors.update({f"{path}/{name}": t for name, t in zip(names, value, strict=False)})
        return {"tensors": bool(value)}
    raise TypeError(f"{path}, a {type(value).__name__} of the correction, cannot be saved")


class Saved:
    """The state in a checkpoint, from which each stage takes its part.

    Args:
        sizes: shape and type of each saved tensor, by key.
        stages: the records of `pack`, one for each stage that saved.
    """

    def __init__(
        self, sizes: Mapping[str, tuple[torch.Size, torch.dtype]], stages: Sequence[Mapping[str, Any]]
    ) -> None:
        self._sizes = sizes
        self._stages = stages
        self._optimizer_keys: dict[str, list[str]] = {}
        for key in sizes:
            kind, _, rest = key.partition("/")
            if kind == "optimizer":
                self._optimizer_keys.setdefault(rest.rpartition("/")[0], []).append(key)

    def targets(self, state: StageState, versions: Sequence[int]) -> dict[str, Tensor]:
        """The tensors to read the stage's state into, by key: its weights themselves, and new tensors for the
        state of the optimizer and the correction.

        Raises:
            CheckpointError: a tensor that the stage needs was not saved, or has another shape or type.
        """
        weights = state.weights
        into: dict[str, Tensor] = {}
        for name, parameter in zip(weights.master.names, weights.master.parameters, strict=True):
            into[f"master/{name}"] = parameter.detach()
            for key in self._optimizer_keys.get(name, ()):
                into[key] = self._empty(key)
        for replica, version in zip(weights.replicas, versions, strict=False):
            for name, member in zip(weights.member_names, replica.members, strict=True):
                into[f"version/{version}/{name}"] = member.detach()
            for name, bias in replica.named_biases().items():
                into[f"version/{version}/{name}"] = bias
        if len(versions) > len(weights.replicas):
            raise CheckpointError(f"versions {list(versions)} were saved; this stage holds fewer replicas")
        names = weights.master.names
        if names:
            into.update({key: self._empty(key) for key in self.correction_keys(names)})
        for key, tensor in into.items():
            saved, wanted = self._size(key), (tensor.shape, tensor.dtype)
            if saved != wanted:
                raise CheckpointError(f"{key} was saved as {saved}, this run wants {wanted}")
        return into

    def take(self, state: StageState, versions: Sequence[int], read: Mapping[str, Tensor]) -> None:
        """Restore the stage from the tensors of `targets`, which have been read."""
        weights, optimizer = state.weights, state.update.optimizer
        for replica, version in zip(weights.replicas, versions, strict=False):
            replica.version = version
        if optimizer is None:
            return
        names, parameters = weights.master.names, weights.master.parameters
        fused = {
            parameter: bool(group.get("fused") or group.get("capturable"))
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        others = {name: kept for stage in self._stages for name, kept in stage["optimizer"].items()}
        for name, parameter in zip(names, parameters, strict=True):
            kept: dict[str, Any] = dict(others.get(name, {}))
            for key in self._optimizer_keys.get(name, ()):
                # Step counts stay on the CPU, except in torch's optimizers that count on the device.
                on_device = read[key].ndim > 0 or fused[parameter]
                kept[key.rpartition("/")[2]] = read[key].to(parameter.device) if on_device else read[key]
            if kept:
                optimizer.state[parameter] = kept
        device = parameters[0].device
        on_device_tensors = {
            key: tensor.to(device) for key, tensor in read.items() if key.startswith("correction/")
        }
        state.update.correction.load_state_dict(self.correction_state(names, on_device_tensors))

    def correction_keys(self, names: Sequence[str]) -> list[str]:
        """Keys of the correction's tensors for these parameters."""
        paths = _tensor_paths(self._correction(names), "correction")
        return [key for path in paths for key in _keys(path, names)]

    def correction_state(self, names: Sequence[str], read: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """The correction's `state_dict` for these parameters, from the tensors of `correction_keys`."""
        state: Mapping[str, Any] = _unpack_correction(self._correction(names), "correction", names, read)
        return state

    def _correction(self, names: Sequence[str]) -> Mapping[str, Any]:
        """The correction's record of these parameters, on which the stages that saved them must agree."""
        wanted = set(names)
        records = [stage["correction"] for stage in self._stages if wanted & set(stage["parameters"])]
        if not records:
            raise CheckpointError(f"parameters {names[0]} .. {names[-1]} are not in it")
        if any(record != records[0] for record in records):
            raise CheckpointError(
                "its stages kept different states of their corrections, which one stage cannot go on from; "
                "go on with as many stages as saved it"
            )
        return dict(records[0])

    def _size(self, key: str) -> tuple[torch.Size, torch.dtype]:
        if key not in self._sizes:
            raise CheckpointError(f"{key} is not in it: it is of another model, optimizer or schedule")
        return self._sizes[key]

    def _empty(self, key: str) -> Tensor:
        size, dtype = self._size(key)
        return torch.empty(size, dtype=dtype)


def _keys(path: str, names: Sequence[str]) -> list[str]:
    return [f"{path}/{name}" for name in names]


def _tensor_paths(structure: Mapping[str, Any], path: str) -> list[str]:
    if "parts" in structure:
        return [
            inner
            for key, part in structure["parts"].items()
            for inner in _tensor_paths(part, f"{path}/{key}")
        ]
    return [path] if structure.get("tensors") else []


def _unpack_correction(
    structure: Mapping[str, Any], path: str, names: Sequence[str], read: Mapping[str, Tensor]
) -> Any:
    if "parts" in structure:
        return {
            key: _unpack_correction(part, f"{path}/{key}", names, read)
            for key, part in structure["parts"].items()
        }
    if "value" in structure:
        return structure["value"]
    return [read[key] for key in _keys(path, names)] if structure["tensors"] else []
