"""Peak memory beyond a stage's own tensors: temporaries of an action, NCCL communicators, and the allocator's
fragmentation."""

from __future__ import annotations

from collections.abc import Sequence

from optimizers.corrections.catalogue import CORRECTIONS, correction_copies
from optimizers.state_size import step_values
from schedules.messages import RankLinks
from stages.config.run_config import RunConfig, chosen_correction, optimizer_options
from stages.memory.estimate import head_chunk_rows, planned_on_gpu, sizes, tied_values
from stages.shape.activations import INDEX_BYTES
from stages.shape.families import describe
from stages.shape.head import shard_chunk
from stages.shape.partition import StageCut, stage_parameters
from stages.shape.spec import ModelPart, Parameter, is_stack


def backward_bytes(config: RunConfig, cut: StageCut, *, mismatched: bool = False) -> int:
    """Temporaries of a backward: gradients of activations and of the largest parameter; and where a
    correction writes weights for it, those that it replaces, and the new ones.

    Args:
        config: of the run.
        cut: of the stage.
        mismatched: whether there are updates between a micro-batch's forward and its backward.
    """
    plain = _plain_backward_bytes(config, cut)
    chosen = chosen_correction(config)
    if chosen is None or not mismatched or not CORRECTIONS[chosen[0]].reads_all_weights:
        return plain
    size, count = sizes(config), sum(each.size for each in stage_parameters(config.model, cut))
    return count * size.replica + max(count * size.master, plain)


def _plain_backward_bytes(config: RunConfig, cut: StageCut) -> int:
    spec, size = describe(config.model), sizes(config)
    tokens = config.train.microbatch_size * config.data.context
    if cut.head_rows is not None:
        return _shard_values(config, cut.head_rows) * size.wide + _gradient_bytes(config, cut)
    whole_head = cut.has_head and head_chunk_rows(config) is None
    blocks = [spec.piece(halves) for halves in cut.pieces]
    parts = blocks + [spec.head] * whole_head
    of_token = [part.passing for part in parts]
    if size.master != size.replica and config.train.compile is not False:
        # A compiled block hands out the factors of its matrices' gradients all at once.
        of_token += [block.deferred for block in blocks]
    passing = tokens * max((size.of(values) for values in of_token), default=0)
    if cut.has_norm:
        # The sum of the shards' terms, and a term of one of them.
        passing = max(passing, 2 * tokens * config.model.width * size.wide)
    return passing + _gradient_bytes(config, cut)


def forward_bytes(config: RunConfig, cut: StageCut) -> int:
    """Temporaries of a forward beyond those of a backward's kind: two copies of a chunk's logits, where the
    head is computed in chunks. A CPU also copies their gradient for its product."""
    size = sizes(config)
    if cut.head_rows is not None:
        copied = size.replica if size.replica != size.wide else 0
        return _shard_values(config, cut.head_rows) * (size.wide + copied)
    rows = head_chunk_rows(config) if cut.has_head else None
    if rows is None:
        return 0
    copied = 0 if size.fused or size.replica == size.wide else size.replica
    return rows * config.model.vocab_size * (2 * size.wide + copied)


def slot_bytes(config: RunConfig, cut: StageCut) -> int:
    """What CUDA graphs (`stages.pipeline.cuda_graphs`) hold for each micro-batch in flight, beside its
    activations: the slot's tensors, and temporaries in a pool of its own. 0 without graphs."""
    if not config.train.cuda_graphs or cut.head_rows is not None:
        return 0
    return _slot_tensors(config, cut) + max(forward_bytes(config, cut), _plain_backward_bytes(config, cut))


def _slot_tensors(config: RunConfig, cut: StageCut) -> int:
    size, tokens = sizes(config), config.train.microbatch_size * config.data.context
    activation, ids = tokens * config.model.width * size.replica, tokens * INDEX_BYTES
    given = ids if cut.has_embedding else 2 * activation
    returned = ids + 2 * size.wide if cut.has_head else 2 * activation
    return given + returned


def _shard_values(config: RunConfig, rows: range) -> int:
    """Logits that a shard of the head computes at once."""
    chunk = shard_chunk(rows=len(rows), wide=sizes(config).wide, on_gpu=planned_on_gpu(config))
    return min(chunk, config.train.microbatch_size * config.data.context) * len(rows)


def _gradient_bytes(config: RunConfig, cut: StageCut) -> int:
    """The largest gradient of a parameter before it is added to its buffer."""
    spec, size = describe(config.model), sizes(config)
    parameters = stage_parameters(config.model, cut)
    largest = max(parameter.size for parameter in parameters)
    largest = max(largest, tied_values(config.model, cut))
    if size.master == size.replica:
        if spec.tied is not None and cut.has_head and cut.has_embedding:
            largest += spec.tied.size  # autograd adds the gradients of its two uses
        return largest * size.replica
    # Autograd casts a narrow gradient to the buffer's type before it accumulates.
    by_autograd = size.replica + size.master
    if config.model.factory is not None:
        return largest * by_autograd
    # Of what `stages.model.gradients.weight_gradient` adds, that of the embedding is a tensor, and those of
    # stacks are.
    tokens = config.train.microbatch_size * config.data.context
    embedding = 2 * tokens * config.model.width if cut.has_embedding else 0  # rows, and their sums by token
    in_blocks = [parameter for parameter in parameters if parameter.part is ModelPart.BLOCK]
    stacks = max((parameter.size for parameter in in_blocks if is_stack(parameter.shape)), default=0)
    plain = config.train.compile is False
    return max(embedding * size.master, stacks * (size.replica if plain else by_autograd))


def update_bytes(config: RunConfig, owned: Sequence[Parameter], *, mismatched: bool = False) -> int:
    """Temporaries of an optimizer step on the parameters that a data rank owns; `mismatched`: as in
    `backward_bytes`."""
    roles = [(parameter.role, parameter.shape) for parameter in owned]
    values, size = (
        step_values(config.optimizer.name, roles, optimizer_options(config.optimizer)),
        sizes(config),
    )
    weights = sum(parameter.size for parameter in owned)
    if (chosen := chosen_correction(config)) is not None:
        narrow = size.replica < size.master
        copies = correction_copies(*chosen, narrow=narrow, mismatch=int(mismatched))
        values = max(values + copies.during_step * weights, copies.outside * weights)
    return values * size.master


NCCL_BUFFER = 2**22
"""Bytes of a channel's buffer for each peer: the default of `NCCL_BUFFSIZE`."""
LINK_CHANNELS = 4
"""Channels of a communicator between two stages."""
GROUP_CHANNELS = 32
"""Channels of a communicator of several ranks: NCCL takes 16 to 32, depending on the links between GPUs."""
NCCL_KERNELS = 279_000_000
"""Bytes that NCCL takes once in a process, at its first communicator. Like the next two measured on an H100
with communicators of one rank, which have no peer and so no buffers (benchmarks/results/h100-2026-11-26.md):
686 MB for the first, 407 for a second, 31 for a link."""
GROUP_BYTES = 407_000_000
"""Bytes of a communicator of several ranks, without the buffers of its peers."""
LINK_BYTES = 31_500_000
"""Bytes of a communicator between two stages, likewise; it has fewer channels."""
ALLOCATOR_SHARE = 0.05
"""Fragmentation as a share of transient memory, where blocks of different sizes alternate. Memory that is
allocated once and kept does not fragment.

With expandable segments, which runs have: one of 17 million parameters reserved 4 % of it on an H100. torch's
default allocator reserved 15 to 21 % above all that was allocated (benchmarks/results/h100-2026-11-26.md).
"""


def communicator_bytes(links: RankLinks, *, stages: int, data: int) -> int:
    """Approximate memory of NCCL for a rank's communicators: what each takes by itself, as measured, and one
    buffer per channel, peer and direction.

    The group of the pipeline exchanges a few numbers around a ring; the group of the data ranks also sends to
    all members at once, one channel each.

    Args:
        links: of the rank in its pipeline.
        stages: ranks of the pipeline.
        data: data ranks.
    """
    groups = (stages > 1) + (data > 1)
    if not groups:
        return 0
    buffers = links.channels * LINK_CHANNELS + 2 * groups * GROUP_CHANNELS + 2 * (data - 1)
    own = links.communicators * LINK_BYTES + groups * GROUP_BYTES
    return NCCL_KERNELS + own + buffers * NCCL_BUFFER


def allocator_bytes(transient: float) -> int:
    """Memory that torch's allocator reserves beyond the bytes in use."""
    return round(ALLOCATOR_SHARE * transient)
