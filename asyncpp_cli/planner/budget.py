"""Where a block's time goes on a device: the roofline's times, part by part.

docs/performance.md shows them, and `benchmarks/big_stage.py --parts` measures the same parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncpp_cli.planner.roofline import ATTENTION_SHARE, MATRIX_SHARE, Roofline
from stages.config import RunConfig
from stages.memory.estimate import sizes
from stages.model.activations import Values
from stages.model.families.catalogue import FAMILIES, describe, mlp
from stages.model.spec import PartSpec

MATRICES = {
    "queries, keys, values": ("attention.query", "attention.key", "attention.value"),
    "output of attention": ("attention.output",),
    "gate and up": ("mlp.gate", "mlp.up"),
    "down": ("mlp.down",),
}
"""The matrices of a dense block, those with one input together."""
NORMS, ROTARY, ATTENTION, SWIGLU = "norms", "rotary positions", "attention", "SwiGLU"
BLOCK = "block as a whole"
ADDING, UPDATE, HEAD = "adding weight gradients", "optimizer step", "head and loss"

_FUSED = {
    NORMS: "one kernel per norm (torch); with the residual's addition where blocks are compiled",
    ROTARY: "where blocks are compiled: one kernel for queries and keys each, in float32",
    ATTENTION: "one kernel (torch's scaled dot-product attention): no scores in memory",
    SWIGLU: "where blocks are compiled: one kernel each way",
    ADDING: "one pass, beside the product that makes them",
    UPDATE: "torch's multi-tensor kernels; Muon's products one matrix at a time",
    HEAD: "in chunks of rows: no whole logits in memory",
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """A part's share of one micro-batch in one block; of the head, in the whole model."""

    part: str
    flops: float | None
    """Floating-point operations of forward and backward, attention as causal; None: not counted apart."""
    moved: float | None
    """Bytes read and written in the device's memory by forward and backward; None: likewise."""
    forward: float
    """Seconds."""
    backward: float
    """Seconds; of an optimizer step, its share in a micro-batch."""
    fused: str


def budget(config: RunConfig, roofline: Roofline) -> list[Line]:
    """The parts of a dense model's first block, and its head.

    Args:
        config: a valid configuration of a dense model.
        roofline: of the device.
    """
    block, size = describe(config.model).blocks[0], sizes(config)
    tokens = config.train.microbatch_size * config.data.context
    device = roofline.device
    peak = device.tflops["bfloat16" if config.train.precision == "bfloat16" else "float32"] * 1e12
    bandwidth = device.bandwidth_gbs * 1e9
    shapes = {parameter.name.removesuffix(".weight"): parameter.shape for parameter in block.parameters}

    def line(part: str, *, flops: float | None, moved: float | None, forward: float, backward: float) -> Line:
        return Line(
            part=part,
            flops=flops,
            moved=moved,
            forward=forward,
            backward=backward,
            fused=_FUSED.get(part, ""),
        )

    def products(part: str) -> Line:
        matrices = [shapes[name] for name in MATRICES[part]]
        values = sum(rows * columns for rows, columns in matrices)
        moved = values + tokens * (sum(rows for rows, _ in matrices) + matrices[0][1])
        seconds = 2 * tokens * values / (peak * MATRIX_SHARE)
        return line(
            part,
            flops=6 * tokens * values,
            moved=3 * moved * size.replica,
            forward=seconds,
            backward=2 * seconds,
        )

    def passes(part: str, kept: Values) -> Line:
        moved = 2 * tokens * size.of(kept)
        seconds = moved / bandwidth
        return line(part, flops=0.0, moved=2.5 * moved, forward=seconds, backward=1.5 * seconds)

    in_norms, in_attention, in_mlp = _kept(config)
    scores = 2 * tokens * block.attention * config.data.context
    count = block.parameter_count
    head = roofline.parts(config).head
    head_values = describe(config.model).head.multiply_adds
    update = roofline.update(config, block.parameters) / config.schedule.microbatches
    of_attention = line(
        ATTENTION,
        flops=3.5 * scores,
        moved=2.5 * tokens * in_attention.narrow * size.replica,
        forward=scores / (peak * ATTENTION_SHARE),
        backward=2.5 * scores / (peak * ATTENTION_SHARE),
    )
    pieces = [
        passes(NORMS, in_norms),
        *map(products, MATRICES),
        passes(ROTARY, in_attention),
        of_attention,
        passes(SWIGLU, in_mlp),
    ]
    added = 2 * count * size.master
    return [
        *pieces,
        line(
            BLOCK,
            flops=sum(piece.flops or 0.0 for piece in pieces),
            moved=sum(piece.moved or 0.0 for piece in pieces),
            forward=sum(piece.forward for piece in pieces),
            backward=sum(piece.backward for piece in pieces),
        ),
        line(ADDING, flops=None, moved=added, forward=0.0, backward=added / bandwidth),
        line(UPDATE, flops=None, moved=None, forward=0.0, backward=update),
        line(
            HEAD,
            flops=6 * tokens * head_values,
            moved=3 * head_values * size.replica
            + 2 * tokens * config.model.vocab_size * (2 * size.wide + size.replica),
            forward=head.forward,
            backward=head.backward,
        ),
    ]


def _kept(config: RunConfig) -> tuple[Values, Values, Values]:
    """What a block keeps for its backward: in its norms, for attention, and in its MLP."""
    width, heads = config.model.width, config.model.heads
    attention: PartSpec = FAMILIES[config.model.family].attention(config.model)
    hidden = mlp(config.model)
    # Each of the two keeps its norm's output, too.
    kept = attention.kept + hidden.kept
    norms = Values(narrow=2 * width, wide=kept.wide - heads, normalized=kept.normalized)
    return (
        norms,
        Values(narrow=attention.kept.narrow - width, wide=heads),
        Values(narrow=hidden.kept.narrow - width),
    )


def utilisation(config: RunConfig, roofline: Roofline, *, recompute: str) -> tuple[float, float]:
    """MFU in 0..1 of a block, and of the whole model on devices that never wait.

    Args:
        config: as for `budget`.
        roofline: of the device.
        recompute: `none`; `selective`: norms, rotary positions and SwiGLU run again; `full`: the block does.
    """
    lines = {line.part: line for line in budget(config, roofline)}
    again = {
        "none": 0.0,
        "selective": sum(lines[part].forward for part in (NORMS, ROTARY, SWIGLU)),
        "full": lines[BLOCK].forward,
    }[recompute]
    block = (
        lines[BLOCK].forward + lines[BLOCK].backward + again + lines[ADDING].backward + lines[UPDATE].backward
    )
    spec, parts, layers = describe(config.model), roofline.parts(config), config.model.layers
    ends = [*spec.embedding.parameters, *spec.head.parameters]
    others = parts.embedding.forward + parts.embedding.backward + parts.head.forward + parts.head.backward
    others += roofline.update(config, ends) / config.schedule.microbatches
    tokens, context = config.train.microbatch_size * config.data.context, config.data.context
    peak = roofline.device.tflops["bfloat16" if config.train.precision == "bfloat16" else "float32"] * 1e12
    return (
        tokens * spec.blocks[0].training_flops(context=context) / (peak * block),
        tokens * spec.training_flops(context=context) / (peak * (layers * block + others)),
    )
