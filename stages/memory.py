"""What a run's stages hold in memory, by kind, from the configuration and its programs. Imports no torch.

What `stages.weigh` measures of a run is held against this by tests. Not in it: what is alive within an action
alone (gradients on their way through a backward, an optimizer's temporaries), and what libraries keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod

from optimizers.state_size import state_values
from schedules import Op, Program, analyze
from stages.config import ModelConfig, RunConfig, optimizer_options
from stages.ownership import share_out
from stages.partition import StageCut, cut_of
from stages.rounds import reduction_plan, room_bytes

TOKEN_BYTES = 8
"""Of a token id."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes that one stage holds at its peak, by kind. Fields are those of the metrics."""

    weights: int
    """All live versions."""
    master: int
    gradients: int
    optimizer: int
    correction: int
    activations: int
    """What micro-batches in flight keep for their backward, their inputs included."""
    recomputed: int
    """One block's activations, which recomputation makes anew within a backward; else 0."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of one number."""

    master: int
    """In the master copy and the gradients."""
    replica: int
    """In the weights computed with, and in activations."""
    wide: int
    """In what is computed in at least float32: norms, attention's sums, the loss."""


def sizes(config: RunConfig) -> Sizes:
    """Bytes of a number under `train.precision`."""
    return {
        "float32": Sizes(master=4, replica=4, wide=4),
        "float64": Sizes(master=8, replica=8, wide=8),
        "bfloat16": Sizes(master=4, replica=2, wide=4),
    }[config.train.precision]


@dataclass(frozen=True, kw_only=True)
class Course:
    """What of a run's programs its memory depends on. Tuples are indexed by stage."""

    versions: tuple[int, ...]
    mismatch: tuple[int, ...]
    in_flight: tuple[frozenset[tuple[int, int]], ...]
    """As `in_flight_counts` has them."""


def course_of(programs: Sequence[Program]) -> Course:
    """The course of a run, from the programs of its segments, one of each kind."""
    analyses = [analyze(program) for program in programs]
    counts = [in_flight_counts(program) for program in programs]
    stages = range(programs[0].num_stages)
    return Course(
        versions=tuple(max(analysis.versions[stage] for analysis in analyses) for stage in stages),
        mismatch=tuple(max(analysis.mismatch_max[stage] for analysis in analyses) for stage in stages),
        in_flight=tuple(frozenset().union(*(seen[stage] for seen in counts)) for stage in stages),
    )


def stage_memory(config: RunConfig, course: Course, *, gradient_buffers: Sequence[int]) -> list[StageMemory]:
    """The peak memory of each stage, on the data rank that holds most of it.

    Activations are those that torch's own kernels keep on a CPU; a compiled block keeps about as much or
    less.

    Args:
        config: the run's.
        course: of the run.
        gradient_buffers: of each stage.

    Raises:
        ValueError: the model is the user's own, of which the configuration does not tell it.
    """
    if config.model.factory is not None:
        raise ValueError(f"what {config.model.factory} keeps in memory is not known before it runs")
    size = sizes(config)
    held = []
    for stage, cut in enumerate(cut_of(config)):
        shapes = parameter_shapes(config.model, cut)
        parameters = sum(prod(shape) for shape in shapes.values())
        updated = _updated(config, shapes, mismatch=course.mismatch[stage])
        master, optimizer, correction = max(updated, key=sum)
        whole, half = microbatch_activations(config, cut)
        held.append(
            StageMemory(
                weights=course.versions[stage] * parameters * size.replica,
                master=master,
                gradients=gradient_buffers[stage] * parameters * size.master,
                optimizer=optimizer,
                correction=correction,
                # What is in flight at once may peak in whole micro-batches or in halves.
                activations=max(wholes * whole + halves * half for wholes, halves in course.in_flight[stage]),
                recomputed=block_activations(config) if config.train.recompute else 0,
            )
        )
    return held


def reduction_bytes(config: RunConfig, cuts: Sequence[StageCut]) -> int:
    """Bytes of the buffers in which a rank that has these stages exchanges gradients with its data-parallel
    peers: as large as the largest of its stages needs them, on the data rank that needs most."""
    plans = []
    for cut in cuts:
        values = [prod(shape) for shape in parameter_shapes(config.model, cut).values()]
        ownership = share_out(values, data_ranks=config.parallel.data)
        plans.append(reduction_plan(values, ownership, number_bytes=sizes(config).master))
    return room_bytes(plans)


def parameter_shapes(config: ModelConfig, cut: StageCut) -> dict[str, tuple[int, ...]]:
    """Shapes of a stage's parameters, by name, in the module's order."""
    width, mlp = config.width, config.mlp_width
    kv_width = config.kv_heads * (width // config.heads)
    shapes: dict[str, tuple[int, ...]] = {}
    if cut.has_embedding:
        shapes["embedding.weight"] = (config.vocab_size, width)
    for block in cut.blocks:
        prefix = f"blocks.{block}"
        shapes |= {
            f"{prefix}.attention_norm.weight": (width,),
            f"{prefix}.attention.query.weight": (width, width),
            f"{prefix}.attention.key.weight": (kv_width, width),
            f"{prefix}.attention.value.weight": (kv_width, width),
            f"{prefix}.attention.output.weight": (width, width),
            f"{prefix}.mlp_norm.weight": (width,),
            f"{prefix}.mlp.gate.weight": (mlp, width),
            f"{prefix}.mlp.up.weight": (mlp, width),
            f"{prefix}.mlp.down.weight": (width, mlp),
        }
    if cut.has_head:
        shapes |= {"norm.weight": (width,), "head.weight": (config.vocab_size, width)}
    return shapes


def in_flight_counts(program: Program) -> list[set[tuple[int, int]]]:
    """For each stage, how many micro-batches are in flight after each of its actions: whole ones, and ones
    whose weight half is still to come."""
    counts = []
    for actions in program.actions_by_stage():
        wholes = halves = 0
        seen = set()
        for action in actions:
            if action.op is Op.FORWARD:
                wholes += 1
            elif action.op is Op.BACKWARD:
                wholes -= 1
            elif action.op is Op.BACKWARD_INPUT:
                wholes, halves = wholes - 1, halves + 1
            elif action.op is Op.BACKWARD_WEIGHT:
                halves -= 1
            seen.add((wholes, halves))
        counts.append(seen)
    return counts


def block_activations(config: RunConfig) -> int:
    """Bytes that one block keeps of one micro-batch, its input included where it is kept as it is."""
    model, size = config.model, sizes(config)
    kv_width = model.kv_heads * (model.width // model.heads)
    norms = 2 * (2 * model.width + 1) * size.wide + 2 * model.width * size.replica
    # query, key, value, the sum of each head's softmax, and what attention gives
    attention = (2 * model.width + 2 * kv_width) * size.replica + model.heads * size.wide
    mlp = 4 * model.mlp_width * size.replica
    return _tokens(config) * (norms + attention + mlp)


def microbatch_activations(config: RunConfig, cut: StageCut) -> tuple[int, int]:
    """Bytes that a stage keeps of one micro-batch from its forward to its backward, and those that a split
    backward keeps from its first half to its second."""
    model, size = config.model, sizes(config)
    activation = model.width * size.replica
    blocks = len(cut.blocks)
    # Norms keep a wider copy of their input, or where there is none the input itself.
    wide_copies = size.wide != size.replica
    kept = TOKEN_BYTES if cut.has_embedding else 0
    if config.train.recompute:
        kept += blocks * activation
    else:
        kept += blocks * (block_activations(config) // _tokens(config))
        if wide_copies and not cut.has_embedding:
            kept += activation
    once = 0
    if cut.has_head:
        kept += (2 * model.width + 1) * size.wide + activation
        kept += model.vocab_size * size.wide + TOKEN_BYTES
        once = 2 * size.wide  # the loss, and what it was divided by
    else:
        kept += activation
    kv_width = model.kv_heads * (model.width // model.heads)
    # inputs of the matrices, and the gradients of what they give
    of_block = 3 * model.width + model.mlp_width + 3 * model.width + 2 * kv_width + 2 * model.mlp_width
    half = blocks * of_block
    if cut.has_head:
        half += model.width + model.vocab_size
    return _tokens(config) * kept + once, _tokens(config) * half * size.replica


def _updated(
    config: RunConfig, shapes: Mapping[str, tuple[int, ...]], *, mismatch: int
) -> list[tuple[int, int, int]]:
    """For each data rank, bytes of the master copy, the optimizer's state and the correction's of what it
    owns of a stage."""
    names = list(shapes)
    sizes_in_order = [prod(shape) for shape in shapes.values()]
    of_ranks = []
    for owned in share_out(sizes_in_order, data_ranks=config.parallel.data).owned:
        mine = {names[parameter]: shapes[names[parameter]] for parameter in owned}
        count = sum(prod(shape) for shape in mine.values())
        values = state_values(config.optimizer.name, mine, optimizer_options(config.optimizer))
        kept = (count, values, _corrections(config, mismatch) * count)
        master, optimizer, correction = (of_kind * sizes(config).master for of_kind in kept)
        of_ranks.append((master, optimizer, correction))
    return of_ranks


def _tokens(config: RunConfig) -> int:
    return config.train.microbatch_size * config.data.context


def _corrections(config: RunConfig, mismatch: int) -> int:
    """Values that the correction keeps for each parameter."""
    if config.correction.name == "discrepancy":
        return int(mismatch > 0)
    return int(config.error_feedback.coefficient != 0 and config.error_feedback.form == "buffered")


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the whole model."""
    whole = StageCut(blocks=range(config.layers), has_embedding=True, has_head=True)
    return sum(prod(shape) for shape in parameter_shapes(config, whole).values())


def message_bytes(config: RunConfig) -> int:
    """What one stage sends another for one micro-batch."""
    return _tokens(config) * config.model.width * sizes(config).replica
