"""Memory of a run's stages by kind, from the configuration and its programs. Imports no torch.

Tests compare it with what `stages.memory.measure` counts. Not included: what lives within one action only
(gradients within a backward, an optimizer's temporaries), and what libraries keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from optimizers.corrections.catalogue import correction_named
from optimizers.state_size import state_values
from schedules import Program
from schedules.analyze import Staleness, staleness
from schedules.messages import Kind
from stages.comm.reduction_rounds import reduction_plan, room_bytes
from stages.config.run_config import ModelConfig, RunConfig, chosen_correction, optimizer_options
from stages.memory.in_flight import CHANGES, Moment, in_flight, most_held
from stages.shape.activations import INDEX_BYTES, CheapPart, Values, message_width
from stages.shape.families import describe
from stages.shape.head import chunk_rows, has_terms
from stages.shape.partition import (
    StageCut,
    cut_of,
    first_alike,
    owned_members,
    ownership_of,
    stage_parameters,
)
from stages.shape.spec import PartSpec, head_dim

INT32_BYTES = 4
BIAS_BYTES = 4
"""Size of a balance bias of an expert."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Peak bytes of one stage, by kind. Fields are those of the metrics."""

    weights: int
    """All live versions, with the balance biases of experts."""
    master: int
    gradients: int
    """With the counts of tokens by expert."""
    optimizer: int
    correction: int
    activations: int
    """Kept by micro-batches in flight for their backward, their inputs included."""
    recomputed: int
    """One block's activations, or those of a cheap part of one, which recomputation computes again within a
    backward; else 0."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of one value, by what it is part of."""

    master: int
    """Bytes of a value of the master copy or the gradients."""
    replica: int
    """Bytes of a value of the weights computed with, or of activations."""
    wide: int
    """Bytes of a value that is computed in at least float32: norms, attention's sums, the loss."""
    fused: bool
    """Whether norms are a kernel each, which keeps no wide copies: on GPUs."""

    def of(self, values: Values | CheapPart) -> int:
        """Bytes of these values."""
        return values.bytes(narrow=self.replica, wide=self.wide, fused=self.fused)


def sizes(config: RunConfig) -> Sizes:
    """Bytes of a value under `train.precision`."""
    master, replica, wide = {"float32": (4, 4, 4), "float64": (8, 8, 8), "bfloat16": (4, 2, 4)}[
        config.train.precision
    ]
    return Sizes(master=master, replica=replica, wide=wide, fused=planned_on_gpu(config))


def planned_on_gpu(config: RunConfig) -> bool:
    """Whether memory and times are those of a GPU: unless `site.device` is `cpu`."""
    return config.site.device != "cpu"


@dataclass(frozen=True, kw_only=True)
class Course:
    """Facts of a run's programs that its memory depends on, by stage, and `moments` by rank."""

    versions: tuple[int, ...]
    mismatch: tuple[int, ...]
    in_flight: tuple[frozenset[tuple[int, int]], ...]
    """Numbers of micro-batches in flight, by stage (`stages.memory.in_flight`)."""
    moments: tuple[frozenset[Moment], ...]
    """Moments at which memory may be largest, by rank (`stages.memory.in_flight`)."""


def course_of(programs: Sequence[Program], delays: Sequence[Staleness] | None = None) -> Course:
    """The course of a run, from the programs of its segments, one of each kind, and their staleness."""
    delays = delays or [staleness(program) for program in programs]
    counts, moments = zip(*map(in_flight, programs), strict=True)
    stages = range(programs[0].num_stages)
    return Course(
        versions=tuple(max(each.versions[stage] for each in delays) for stage in stages),
        mismatch=tuple(max(each.mismatch_max[stage] for each in delays) for stage in stages),
        in_flight=tuple(frozenset().union(*(seen[stage] for seen in counts)) for stage in stages),
        moments=tuple(
            frozenset().union(*(seen[rank] for seen in moments)) for rank in range(programs[0].num_ranks)
        ),
    )


def stage_memory(config: RunConfig, course: Course, *, gradient_buffers: Sequence[int]) -> list[StageMemory]:
    """The peak memory of each stage, on the data rank that holds most of it.

    Activations are those that torch's own kernels keep, on a CPU or a GPU; a compiled block keeps about as
    much or less.

    Args:
        config: the run's.
        course: of the run.
        gradient_buffers: of each stage.

    Raises:
        ValueError: the model is the user's own, which the configuration does not describe.
    """
    if config.model.factory is not None:
        raise ValueError(f"what {config.model.factory} keeps in memory is not known before it runs")
    held = []
    # Most stages are alike.
    known: dict[tuple[StageCut, int, int, int], tuple[dict[str, int], tuple[int, int]]] = {}
    for stage, cut in enumerate(first_alike(config.model, cut_of(config))):
        facts = course.versions[stage], course.mismatch[stage], gradient_buffers[stage]
        if (cut, *facts) not in known:
            updated = updated_bytes(config, cut, mismatch=course.mismatch[stage])
            lasting = lasting_bytes(
                config,
                cut,
                updated,
                versions=course.versions[stage],
                gradient_buffers=gradient_buffers[stage],
            )
            known[cut, *facts] = lasting, microbatch_activations(config, cut)
        lasting, (whole, half) = known[cut, *facts]
        # The peak may be of whole micro-batches or of halves.
        most = max(wholes * whole + halves * half for wholes, halves in course.in_flight[stage])
        held.append(StageMemory(**lasting, activations=most))
    return held


def lasting_bytes(
    config: RunConfig,
    cut: StageCut,
    updated: tuple[int, int, int],
    *,
    versions: int,
    gradient_buffers: int,
) -> dict[str, int]:
    """Bytes of a stage by kind, as in `StageMemory`, but for the activations that it keeps.

    Args:
        config: the run's.
        cut: the stage.
        updated: its `updated_bytes`.
        versions: of its weights.
        gradient_buffers: of the stage.
    """
    size, parameters = sizes(config), stage_parameters(config.model, cut)
    count = sum(parameter.size for parameter in parameters)
    halves = (describe(config.model).halves[half] for half in cut.halves)
    biases = sum(bias.size for half in halves for bias in half.biases)
    master, optimizer, correction = updated
    further = master if config.parallel.shard_gradients else count * size.master
    return {
        "weights": versions * (count * size.replica + biases * BIAS_BYTES),
        "master": master,
        "gradients": count * size.master
        + (gradient_buffers - 1) * further
        + tied_values(config.model, cut) * size.master
        + gradient_buffers * biases * INDEX_BYTES,
        "optimizer": optimizer,
        "correction": correction,
        "recomputed": recomputed_bytes(config, cut),
    }


def tied_values(model: ModelConfig, cut: StageCut) -> int:
    """Values of the matrix that a stage's head shares with the embedding of another stage."""
    tied = describe(model).tied
    return tied.size if tied is not None and cut.has_head and not cut.has_embedding else 0


def reduction_bytes(config: RunConfig, cuts: Sequence[StageCut]) -> int:
    """Bytes of the buffers in which a rank with these stages exchanges gradients with its data-parallel
    peers: the most that one of its stages needs, on the data rank that needs most."""
    plans = []
    for cut in cuts:
        parameters = stage_parameters(config.model, cut)
        ownership = ownership_of(parameters, data_ranks=config.parallel.data)
        values = [parameter.size for parameter in parameters]
        plans.append(reduction_plan(values, ownership, number_bytes=sizes(config).master))
    return room_bytes(plans)


def rank_activations(config: RunConfig, program: Program) -> list[int]:
    """Peak bytes of each rank's activations in a segment; its stages need not hold their most at once."""
    sizes = [microbatch_activations(config, cut) for cut in cut_of(config)]
    held = []
    for rank, actions in enumerate(program.actions):
        stages = [stage for stage, holder in enumerate(program.rank_of_stage) if holder == rank]
        now = dict.fromkeys(stages, (0, 0))
        seen = set()
        for stage, op, _, _ in actions:
            (wholes, halves), (more, more_halves) = now[stage], CHANGES[op]
            now[stage] = wholes + more, halves + more_halves
            seen.add(tuple(now.values()))
        held.append(most_held(seen, [sizes[stage] for stage in stages]))
    return held


def recomputed_bytes(config: RunConfig, cut: StageCut) -> int:
    """Bytes that recomputation makes at once of a micro-batch in one of a stage's blocks: of what the stage
    holds of the block, its input included where a norm keeps it as it is, or of its largest cheap part."""
    size, spec = sizes(config), describe(config.model)
    if config.train.recompute == "none":
        return 0
    pieces = {id(piece): piece for piece in map(spec.piece, cut.pieces)}.values()
    if config.train.recompute == "full":
        return max((_tokens(config) * size.of(piece.kept) + _ends(piece) for piece in pieces), default=0)
    return _tokens(config) * max((size.of(part) for piece in pieces for part in piece.cheap), default=0)


def microbatch_activations(config: RunConfig, cut: StageCut) -> tuple[int, int]:
    """Bytes that a stage keeps of one micro-batch from its forward to its backward, and those that a split
    backward keeps from its input half to its weight half.

    Both are a number of bytes per token, and some that are there once, however many tokens there are.
    """
    spec, size, recompute = describe(config.model), sizes(config), config.train.recompute
    blocks = [spec.piece(halves) for halves in cut.pieces]
    head_matrix = config.model.width * config.model.vocab_size * size.wide
    ends = sum(map(_ends, blocks))

    kept = INDEX_BYTES if cut.has_embedding and cut.head_rows is None else 0  # token ids
    if recompute == "full":
        kept += len(blocks) * config.model.width * size.replica  # the blocks' inputs
    elif recompute == "selective":
        kept += sum(size.of(block.kept_selectively) for block in blocks)
    else:
        kept += sum(size.of(block.kept) for block in blocks)
    if cut.has_norm:
        kept += size.of(spec.norm.kept)
    kept_once = 0 if recompute == "full" else ends
    if config.data.document_mask:
        kept_once += _document_bytes(config, cut)
    deferred, deferred_once = sum(size.of(block.deferred) for block in blocks), ends

    if cut.head_rows is not None:
        # From S to T: hidden states, probabilities, the logarithm of their sum, targets and their logits.
        numbers = config.model.width + len(cut.head_rows)
        deferred = numbers * size.replica + 2 * size.wide + INDEX_BYTES
    elif cut.has_head and head_chunk_rows(config) is not None:
        # Logits are not kept: their gradients are computed at once. That of the head's input is as large as
        # the input, that of the matrix is there once.
        kept += size.of(spec.head.kept) - config.model.vocab_size * size.wide
        kept_once += head_matrix
        deferred_once += head_matrix
    elif cut.has_head:
        kept += size.of(spec.head.kept) + INDEX_BYTES  # and targets
        kept_once += size.wide  # what the loss is divided by
        deferred += size.of(spec.head.deferred)
    tokens = _tokens(config)
    return tokens * kept + kept_once, tokens * deferred + deferred_once


def _ends(piece: PartSpec) -> int:
    """Bytes of where each expert's rows end, of a micro-batch: int32, of as many as have a bias."""
    return 4 * sum(bias.size for bias in piece.biases)


def _document_bytes(config: RunConfig, cut: StageCut) -> int:
    """Bytes of a micro-batch's rotary table, and of its `stages.data.documents.Documents`."""
    tokens = _tokens(config)
    rotates = any(half % 2 == 0 for half in cut.halves) or (config.train.recompute == "full" and cut.blocks)
    table = 2 * tokens * head_dim(config.model) * sizes(config).wide if rotates else 0
    in_host_memory = INDEX_BYTES * (tokens + 2)
    return table + INT32_BYTES * (2 * tokens + 1) + (0 if planned_on_gpu(config) else in_host_memory)


def head_chunk_rows(config: RunConfig) -> int | None:
    """Rows in which the head of a run is computed; None: all at once."""
    model = config.model
    if model.factory is not None:
        return None
    return chunk_rows(
        tokens=_tokens(config),
        width=model.width,
        vocabulary=model.vocab_size,
        wide=sizes(config).wide,
        on_gpu=planned_on_gpu(config),
        always=has_terms(model),
    )


def updated_bytes(config: RunConfig, cut: StageCut, *, mismatch: int) -> tuple[int, int, int]:
    """Bytes of the master copy, the optimizer's state and the correction's state of the members of a stage
    that a data rank owns: the one with the most."""
    optimizer, options = config.optimizer.name, optimizer_options(config.optimizer)
    size, kept = sizes(config).master, _corrections(config, mismatch)
    parameters = stage_parameters(config.model, cut)
    updated = []
    for owned in owned_members(parameters, data_ranks=config.parallel.data):
        master = sum(member.size for member in owned) * size
        state = state_values(optimizer, [(member.role, member.shape) for member in owned], options) * size
        updated.append((master, state, kept * master))
    return max(updated, key=sum)


def _tokens(config: RunConfig) -> int:
    return config.train.microbatch_size * config.data.context


def _corrections(config: RunConfig, mismatch: int) -> int:
    """Values that the correction keeps for each parameter, with the average of the weights."""
    further = int(config.train.ema_decay is not None)
    chosen = chosen_correction(config)
    if chosen is None:
        return further
    name, options = chosen
    return further + correction_named(name).values_kept(options, mismatch=mismatch)


def message_bytes(config: RunConfig, kind: Kind = Kind.ACTIVATIONS) -> int:
    """Bytes that one stage sends another for one micro-batch."""
    size = sizes(config)
    per_wide = size.wide // size.replica
    return _tokens(config) * message_width(kind, width=config.model.width, per_wide=per_wide) * size.replica
