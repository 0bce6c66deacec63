"""Compiled blocks in a rehearsal: the graphs that torch.compile makes before it generates code.

Tracing, and the choice of what a forward keeps for its backward, need no device: they are done on a CPU, and
the graphs then run on the tensors of the rehearsal, operator by operator. Generated kernels fuse many of
these, so temporaries within a block are an upper bound; what the block keeps is the compiler's own choice.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_map

from stages.model.runner import block_function
from stages.rehearsal.watch import Watch

TANGENT = "tangents"
"""Name of a backward's inputs that are gradients."""


class _Form(NamedTuple):
    """What a trace depends on of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class _Graphs(NamedTuple):
    """A block's forward and backward."""

    forward: GraphModule
    backward: GraphModule
    outputs: int
    """Number of the forward's outputs; what follows them is kept for the backward."""
    inputs: tuple[int, ...]
    """Places of the forward's inputs among the leaves of the block's arguments."""


_traced: dict[tuple[Any, ...], _Graphs] = {}
"""By kind of block and forms of its arguments: all ranks have the same few."""


def compile_on(watch: Watch) -> Callable[..., Callable[..., Any]]:
    """In place of `stages.model.runner._compile` in a rehearsal."""

    def compile_block(settings: tuple[Any, ...], **kind: bool) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            forms = tree_map(_form, given)
            key = (settings, *kind.items(), *tree_leaves(forms, is_leaf=_is_form))
            if key not in _traced:
                # In a thread of its own: torch's modes, such as the rehearsal's, are those of a thread.
                with ThreadPoolExecutor(1) as thread:
                    trace = partial(_trace, settings, kind, forms)
                    _traced[key] = thread.submit(trace).result()
            outputs = _Run.apply(_traced[key], watch, *tree_leaves(given))  # type: ignore[no-untyped-call]
            return outputs[0] if len(outputs) == 1 else outputs

        return run

    return compile_block


def _form(given: Any) -> Any:
    if not isinstance(given, Tensor):
        return given
    return _Form(tuple(given.shape), given.stride(), given.dtype, given.requires_grad)


def _is_form(value: object) -> bool:
    return isinstance(value, _Form)


def _trace(settings: tuple[Any, ...], kind: dict[str, bool], forms: Any) -> _Graphs:
    """The graphs of a block, by torch's tracer and its partitioner for the default compiler."""
    partitioned: list[tuple[GraphModule, GraphModule, int]] = []
    inputs: list[int] = []

    def partition(joint: GraphModule, joint_inputs: Any, **how: Any) -> tuple[GraphModule, GraphModule]:
        pair = min_cut_rematerialization_partition(joint, joint_inputs, compiler="inductor", **how)
        partitioned.append((*pair, how["num_fwd_outputs"]))
        return pair

    def backend(graph: GraphModule, examples: list[Tensor]) -> Any:
        inputs.extend(
            places[id(node.meta["grapharg"].example)] for node in graph.graph.find_nodes(op="placeholder")
        )
        return aot_autograd(
            fw_compiler=_as_it_stands, partition_fn=partition, decompositions=select_decomp_table()
        )(graph, examples)

    with FakeTensorMode(), torch.enable_grad():
        given = tree_map(_empty, forms, is_leaf=_is_form)
        places = {id(tensor): place for place, tensor in enumerate(tree_leaves(given))}
        function = block_function(settings, **kind)
        # Every block has the same function, of which the compiler keeps no more than eight.
        torch.compiler.reset()
        torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*given)
    ((forward, backward, outputs),) = partitioned
    return _Graphs(forward, backward, outputs, tuple(inputs))


def _as_it_stands(graph: GraphModule, _: Any) -> Any:
    return make_boxed_func(graph.forward)


def _empty(form: Any) -> Any:
    if not isinstance(form, _Form):
        return form
    empty = torch.empty_strided(form.size, form.stride, dtype=form.dtype)
    return empty.requires_grad_(form.requires_grad)


class _Run(torch.autograd.Function):
    """Performs a block's graphs."""

    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, watch: Watch, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs, ctx.watch, ctx.number = graphs, watch, len(leaves)
        with watch.meaning(gpu=True), torch._C.DisableTorchFunction():
            made = graphs.forward(*(leaves[place] for place in graphs.inputs))
        outputs, kept = made[: graphs.outputs], made[graphs.outputs :]
        ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return cast("tuple[Tensor, ...]", tuple(outputs))

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        graphs: _Graphs = ctx.graphs
        names = [node.name for node in graphs.backward.graph.find_nodes(op="placeholder")]
        taken = sum(name.startswith(TANGENT) for name in names)
        floating = [tangent for tangent in tangents if tangent.is_floating_point()]
        with ctx.watch.meaning(gpu=True), torch._C.DisableTorchFunction():
            made = graphs.backward(*ctx.saved_tensors, *floating[:taken])
        gradients: list[Tensor | None] = [None] * ctx.number
        for place, gradient in zip(graphs.inputs, made, strict=True):
            gradients[place] = gradient
        return (None, None, *gradients)
