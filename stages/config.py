"""The typed configuration of a run. Imports no torch, so that the command line checks it quickly.

Each field's meaning, unit and accepted values stand under it. `site` holds what may differ from machine to
machine without making it another run; everything else is part of the run's identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import MISSING

from optimizers import CORRECTIONS, METHODS, CorrectionMethod, Method

T = TypeVar("T")


def _with_options(methods: Iterable[Method | CorrectionMethod]) -> Callable[[type[T]], type[T]]:
    """Give a section a field for every option of `methods`; null stands for the method's default."""
    options = {name: option for method in methods for name, option in method.options.items()}

    def extend(section: type[T]) -> type[T]:
        extended = make_dataclass(
            section.__name__,
            [
                (name, type(option.default) | None, field(default=None, metadata={"option": True}))
                for name, option in options.items()
            ],
            bases=(section,),
        )
        extended.__module__ = section.__module__
        return extended

    return extend


class _Declared:
    """A section with options that `_with_options` adds."""

    if TYPE_CHECKING:

        def __getattr__(self, option: str) -> Any: ...

        def __setattr__(self, option: str, value: Any) -> None: ...


@dataclass
class ScheduleConfig:
    name: str = MISSING
    """A schedule of `schedules.NAMES`, or `package.module:function`: one of your own (docs/schedules.md)."""
    microbatches: int = 4
    """Micro-batches per step, in each pipeline."""
    delay: int = 1
    """2bw, 2bw-v: updates between the weights a gradient is computed at and those it is applied to. In 2bw
    a delay of 1 needs at least `parallel.stages` - 1 micro-batches."""
    ahead: int = 1
    """2bw: forwards a stage runs ahead of its backwards, for each stage after it. 2 hides late messages
    and uneven times, and keeps up to twice the activations; a delay of 1 then needs twice as many
    micro-batches. 2bw-v: each message has `ahead` - 1 sixths of a micro-batch's time to arrive."""
    chunks: int = 1
    """interleaved-1f1b, looped-bfs: stages per rank."""
    split: bool = False
    """2bw-v: split backwards, for fewer activations."""
    update_interval: int | None = None
    """pipedream, paci: micro-batches between a stage's updates; null: 1 for pipedream, `microbatches` for
    paci."""


@_with_options(METHODS.values())
@dataclass
class OptimizerConfig(_Declared):
    """With a key for every option that an optimizer declares (`asyncpp optimizers show NAME`)."""

    name: str = MISSING
    """An optimizer of `optimizers.NAMES`, or `package.module:name`: one of your own (docs/optimizers.md)."""
    lr: float = 2e-3
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled; on matrices only."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises linearly."""
    final_lr: float = 0.1
    """Learning rate at the end of the schedule, as a share of the peak."""
    schedule: str = "cosine"
    """Learning rate after the warm-up: `cosine`, `linear`, `constant`, or `wsd` (stable, then a linear
    decay)."""
    decay_share: float | None = None
    """wsd: share of the steps in which the learning rate decays; null: 0.2."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of an optimizer of your own, passed to it by keyword: `optimizer.options.KEY`."""


@dataclass
class ErrorFeedbackConfig:
    coefficient: float = 0.0
    """c in x' = x - u - c (u - u_previous); 0 turns the correction off."""
    form: str = "look-ahead"
    """`look-ahead` (no extra buffer) or `buffered` (the reference)."""
    decay_at: str = "y"
    """Weights that weight decay applies to: `y` (evaluated and saved) or `x` (computed with; `buffered`
    only)."""


CORRECTION_NAMES = tuple(name for name in CORRECTIONS if not name.startswith("error-feedback"))
"""The corrections that `correction.name` accepts; error feedback has a section of its own."""


@_with_options(CORRECTIONS[name] for name in CORRECTION_NAMES)
@dataclass
class CorrectionConfig(_Declared):
    """With a key for every option that a correction declares."""

    name: str = "none"
    """A correction instead of error feedback, one of `optimizers.CORRECTIONS`, or `none`."""


@dataclass
class ModelConfig:
    name: str = MISSING
    """Name of the model size, for display."""
    family: str = "llama"
    """Family of the decoder (docs/models.md): `llama`, or `qwen3` (queries and keys are normalized)."""
    layers: int = MISSING
    """Number of blocks."""
    width: int = MISSING
    """Width of the activations between blocks."""
    heads: int = MISSING
    """Number of attention heads."""
    kv_heads: int = MISSING
    """Key/value heads (grouped-query attention); divides `heads`."""
    head_dim: int | None = None
    """Width of a head; null: `width` / `heads`."""
    mlp_width: int = MISSING
    """Hidden width of the SwiGLU block."""
    vocab_size: int = 256
    """Number of tokens in the vocabulary."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    factory: str | None = None
    """`package.module:function` that makes a model of your own (docs/models.md); null: the decoder of
    `model.family`."""
    init: str | None = None
    """Initial weights: safetensors (a folder or a file) from `asyncpp export`, or of the family's class in
    Hugging Face transformers; null: random, from `seed`."""
    init_sha256: str | None = None
    """SHA-256 of the weights in `init`. `sweep` writes it; a run refuses other weights."""


@dataclass
class DataConfig:
    path: str | None = None
    """A folder that `asyncpp data prepare` wrote; token shards of llm.c, modded-nanogpt or nanoGPT (a .bin
    file or a folder of them) or of Megatron-LM (the .bin beside its .idx); or a text file or a folder of
    them, read as bytes. null: the text of the Python standard library."""
    sha256: str | None = None
    """SHA-256 of the data and its split. `sweep` writes it; a run refuses other data."""
    context: int = 128
    """Tokens in a sequence."""
    validation_share: float = 0.05
    """Share held out for validation if the data has no split of its own: whole files of a folder of text,
    the end of token shards."""


@dataclass
class ParallelConfig:
    stages: int = 2
    """Pipeline ranks; each holds one stage, or `schedule.chunks` of them."""
    cut: list[int] | None = None
    """Blocks in each stage, in order; null: stages of equal cost."""
    data: int = 1
    """Data-parallel replicas of the pipeline, each with its own micro-batches. A run has `stages` x
    `data` processes."""


@dataclass
class TrainConfig:
    steps: int = MISSING
    """Optimizer steps. Each has `schedule.microbatches` micro-batches on each of the `parallel.data`
    pipelines."""
    microbatch_size: int = 8
    """Sequences in a micro-batch."""
    eval_interval: int = 100
    """Steps between evaluations; the pipeline drains for each. The run always ends with one."""
    eval_microbatches: int = 8
    """Micro-batches of validation data per evaluation."""
    clip: str = "global"
    """Gradient clipping: `global` (norm over all stages), `stage` (each stage by its own norm) or `none`."""
    clip_norm: float = 1.0
    """Largest gradient norm after clipping."""
    max_skipped: int = 20
    """Consecutive steps with a non-finite gradient, which are skipped, before the run fails; 0: it never
    fails for that."""
    precision: str = "float32"
    """`float32`, `float64` (for tests), or `bfloat16` (weights used for computing; master weights and
    gradients stay float32)."""
    recompute: bool = False
    """Keep only the input of each block and run the block again in backward: fewer activations, a third
    more compute. Without a weight stash (`paci`) it changes the numbers, because the second forward reads
    the newest weights."""
    compile: bool = False
    """Compile the blocks with torch.compile. Needs a C++ compiler; the first step takes up to a minute
    longer."""
    deterministic: bool = False
    """On a GPU, use only torch kernels that give the same bits every time: they may be slower, and an
    operator without one is an error. A CPU run is deterministic anyway."""
    checkpoint_interval: int = 100
    """Steps between checkpoints. The pipeline drains for each, which changes the numbers of `pipedream`
    and `paci` slightly. 0: only at the end, and when the run is stopped."""


@dataclass
class SiteConfig:
    device: str = "auto"
    """`auto` (CUDA if there is one), `cpu` or `cuda`."""
    threads: int = 1
    """CPU threads per process."""
    timeout: float = 60.0
    """Seconds a process waits for a message from another rank. A process that starts nothing for twice as
    long dumps its stack traces and exits."""
    start_timeout: float = 600.0
    """Seconds for all processes of a run to start, find each other and build their stages."""
    grace: float = 30.0
    """Seconds a run may take to save once it is told to stop; then it is killed."""
    save_timeout: float = 1800.0
    """Seconds that reading or writing a checkpoint may take."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep."""
    peak_tflops: float | None = None
    """Peak of one device at the run's precision, TFLOP/s, for the report's MFU; null: looked up by the
    device's name."""
    memory_gb: float | None = None
    """Memory available to a rank, in units of 10^9 bytes. `sweep` refuses cells that do not fit; null: no
    check."""
    gpu: str | None = None
    """GPU of each rank (h100, a100, ...), for the step time that `sweep` estimates; null: no estimate."""


@dataclass
class RunConfig:
    """All settings of a run: those that decide what it computes, and `site`."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    error_feedback: ErrorFeedbackConfig = field(default_factory=ErrorFeedbackConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    site: SiteConfig = field(default_factory=SiteConfig)
    seed: int = 0
    """Seed of the initial weights (together with each parameter's name) and of the data order."""


def optimizer_options(config: OptimizerConfig) -> dict[str, float | bool | str]:
    """The optimizer options that the configuration sets; the others keep their defaults."""
    return {**declared_options(config), **config.options}


def correction_options(config: CorrectionConfig) -> dict[str, float | bool | str]:
    """The correction options that the configuration sets; the others keep their defaults."""
    return declared_options(config)


def declared_options(section: OptimizerConfig | CorrectionConfig) -> dict[str, float | bool | str]:
    """The options of the catalogue that a section sets."""
    names = [entry.name for entry in fields(section) if entry.metadata.get("option")]
    options = {name: getattr(section, name) for name in names}
    return {name: value for name, value in options.items() if value is not None}


def tokens_per_step(config: RunConfig) -> int:
    """Tokens per optimizer step, over all micro-batches of all pipelines."""
    microbatches = config.schedule.microbatches * config.parallel.data
    return microbatches * config.train.microbatch_size * config.data.context
