"""Puts a model under torch's `fully_shard`, with gathers and sums that are the run's own.

A block is a unit, which torch gathers before its forward and backward; embedding, last norm and head are the
unit of the module itself. Shards have the type of the master copy, and torch rounds them as it gathers them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from stages.comm.sharding import Gather, Scatter, Sharding
from stages.model.decoder import RunBlock, Stage
from stages.model.runner import RUN_BY
from stages.weights.number_formats import Types


def shard_fully(
    module: Stage, sharding: Sharding, *, types: Types, keeps_weights: bool, device: torch.device
) -> list[FSDPModule]:
    """Shard a module that has no values yet, and give it room for its shards.

    Args:
        module: the whole model, on the device `meta`, in the type of the master copy.
        sharding: the processes.
        types: of shards and of gathered weights.
        keeps_weights: whether a block's weights stay from its forward to its backward.
        device: holds the shards.

    Returns:
        The units: the module itself, and its blocks.
    """
    policy = MixedPrecisionPolicy()
    narrow = types.replica != types.master
    if narrow:
        # Types of activations are as in other runs: nothing is cast but weights.
        policy = MixedPrecisionPolicy(
            param_dtype=types.replica, reduce_dtype=types.master, cast_forward_inputs=False
        )
    blocks = list(module.blocks.values())
    for block in blocks:
        fully_shard(block, mesh=sharding.mesh, reshard_after_forward=not keeps_weights, mp_policy=policy)
        setattr(block, RUN_BY, MethodType(_run_by, block))
        register_fsdp_forward_method(block, RUN_BY)
    fully_shard(module, mesh=sharding.mesh, mp_policy=policy)
    module.to_empty(device=device)
    module.prepare(device=device, dtype=types.replica)
    units = cast("list[FSDPModule]", [module, *blocks])
    for unit in units:
        # The executor divides the loss; sums are of all processes.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_custom_all_gather(cast(Any, Gather(sharding)))
        unit.set_custom_reduce_scatter(cast(Any, Scatter(sharding)))
        if sharding.replicas is not None:
            unit.set_all_reduce_hook(sharding.add_replicas)
    if narrow:
        for block in blocks:
            _widen_gradients(block, partial(_own_parameters, block), types.master)
        _widen_gradients(module, partial(_own_parameters, module, blocks), types.master)
    return units


def _own_parameters(module: nn.Module, without: Sequence[nn.Module] = ()) -> list[nn.Parameter]:
    inner = {id(parameter) for other in without for parameter in other.parameters()}
    return [parameter for parameter in module.parameters() if id(parameter) not in inner]


def _widen_gradients(
    unit: nn.Module, parameters: Callable[[], list[nn.Parameter]], dtype: torch.dtype
) -> None:
    """Let the backward of a unit add gradients in a wider type, as it does where replicas are whole
    (`stages.model.gradients.weight_gradient`).

    Args:
        unit: of `fully_shard`; this hook follows torch's, so its weights are whole.
        parameters: gives its own.
        dtype: of the gradients.
    """

    whole: list[nn.Parameter] = []

    def make_room(gradient: Tensor) -> None:
        for parameter in whole:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)

    def before(unit: nn.Module, given: Any) -> None:
        whole[:] = parameters()
        for parameter in whole:
            parameter.grad_dtype = dtype

    def after(unit: nn.Module, given: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if tensor.requires_grad:
                tensor.register_hook(make_room)
                return

    unit.register_forward_pre_hook(before)
    unit.register_forward_hook(after)


def _run_by(block: nn.Module, run: RunBlock, *given: Any) -> Any:
    """Run a block by a function that does not call it, with the hooks that a call would have."""
    for hook in block._forward_pre_hooks.values():
        if hook.__module__ == __name__:
            hook(block, given)
    output = run(block, *given)
    for hook in block._forward_hooks.values():
        if hook.__module__ == __name__:
            hook(block, given, output)
    return output
