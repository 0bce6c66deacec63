"""The typed configuration of a run. Imports no torch, so that the command line checks it quickly.

Each field's meaning, unit and accepted values stand under it. `site` holds what may differ from machine to
machine without making it another run; everything else is part of the run's identity.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from omegaconf import MISSING


@dataclass
class ScheduleConfig:
    name: str = MISSING
    """A schedule of `schedules.NAMES`."""
    microbatches: int = 4
    """Micro-batches a step of each pipeline."""
    delay: int = 1
    """2bw: updates between the weights of a gradient and those it is applied to; 1 needs as many
    micro-batches as there are stages, less one."""
    ahead: int = 1
    """2bw: forwards that a stage runs ahead of its backwards, for each stage behind it. 2 hides late messages
    and uneven times, for up to twice the activations; a delay of 1 needs twice the micro-batches then."""
    chunks: int = 1
    """interleaved-1f1b: stages that a rank holds."""
    update_interval: int | None = None
    """pipedream, paci: micro-batches between a stage's updates; null: 1 for pipedream, `microbatches` for
    paci."""


@dataclass
class OptimizerConfig:
    name: str = MISSING
    """An optimizer of `optimizers.NAMES`."""
    lr: float = 2e-3
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled; on matrices only."""
    beta1: float | None = None
    """First-moment decay of the Adam family; null: the optimizer's default."""
    beta2: float | None = None
    """Second-moment decay of the Adam family; null: the optimizer's default."""
    eps: float | None = None
    """Added to the denominator in the Adam family; null: the optimizer's default."""
    momentum: float | None = None
    """Momentum of the matrix rule (Muon); null: the optimizer's default."""
    nesterov: bool | None = None
    """sgd, muon, normuon: step along the look-ahead of the momentum; null: the optimizer's default."""
    scale: str | None = None
    """muon, normuon: `match-rms` (AdamW's learning rates) or `original`; null: match-rms."""
    iteration: str | None = None
    """muon, normuon, scion: orthogonalize by `newton-schulz` or `polar-express`; null: newton-schulz."""
    precision: str | None = None
    """muon, normuon, scion: orthogonalize in `float32`, `bfloat16` or `auto`; null: auto."""
    auxiliary_lr_ratio: float | None = None
    """muon, normuon, scion: learning rate of the AdamW part as a share of `lr`; null: 1."""
    vector_beta1: float | None = None
    """mars: first-moment decay of the AdamW part, which updates the vectors; null: 0.9."""
    vector_beta2: float | None = None
    """mars: second-moment decay of the AdamW part; null: 0.95."""
    momentum_decay: float | None = None
    """nadamw: how fast the momentum warms up to beta1; null: 0.004."""
    row_beta2: float | None = None
    """normuon: decay of the row-wise second moment; null: 0.95."""
    row_eps: float | None = None
    """normuon: added to the row-wise denominator; null: 1e-10."""
    refresh_interval: int | None = None
    """soap, basis-rotation: steps between refreshes of the bases; null: 10."""
    source: str | None = None
    """basis-rotation: bases from the `second-moment` or the `first-moment`; null: second-moment."""
    geometry: str | None = None
    """basis-rotation: rotate both sides (`bilateral`) or the smaller (`unilateral`); null: bilateral."""
    stage_aware: bool | None = None
    """basis-rotation: refresh more often where the delay is larger, as often in all; null: false."""
    beta3: float | None = None
    """adan: decay of the second moment; null: 0.99."""
    gamma: float | None = None
    """mars: weight of the gradient's change; null: 0.025."""
    radius: float | None = None
    """scion: size of a step on matrices in blocks; null: 50."""
    sign_radius: float | None = None
    """scion: size of a step on embedding and head; null: 3000."""
    constrained: bool | None = None
    """scion: shrink by the learning rate in every step, which bounds the weights; null: false."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises linearly."""
    final_lr: float = 0.1
    """Learning rate at the end of the cosine, as a share of the peak."""


@dataclass
class ErrorFeedbackConfig:
    coefficient: float = 0.0
    """c in x' = x - u - c (u - u_previous); 0 turns the correction off."""
    form: str = "look-ahead"
    """`look-ahead` (no extra buffer) or `buffered` (the reference)."""
    decay_at: str = "y"
    """Weights that weight decay is a share of: `y` (evaluated and saved) or `x` (computed with; `buffered`
    only)."""


@dataclass
class CorrectionConfig:
    name: str = "none"
    """Another correction than error feedback: one of `optimizers.CORRECTIONS` or `none`."""
    flavour: str | None = None
    """weight-prediction: `last-update`, `momentum` or `adam-moments`; null: last-update."""
    reach: float | None = None
    """weight-prediction: updates to look ahead, as a share of the stage's delay; null: 1."""
    anneal: int | None = None
    """lr-discount: updates until nothing is discounted any more; null: 1000."""
    memory: float | None = None
    """discrepancy: share of the average velocity left after as many updates as the mismatch; null: 0.135."""
    strength: float | None = None
    """delay-compensation: lambda; null: 0.04."""
    sync_steps: int | None = None
    """sync-start: synchronous steps at the start; null: 100."""


@dataclass
class ModelConfig:
    name: str = MISSING
    """Name of the size, for people."""
    layers: int = MISSING
    width: int = MISSING
    heads: int = MISSING
    kv_heads: int = MISSING
    """Key/value heads (grouped-query attention); divides `heads`."""
    mlp_width: int = MISSING
    """Hidden width of the SwiGLU block."""
    vocab_size: int = 256
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    factory: str | None = None
    """`package.module:function` that makes a model of your own (docs/models.md); null: the decoder of
    `stages.model`."""
    init: str | None = None
    """Weights to start from: safetensors (a folder or a file) of `asyncpp export` or of a Llama; null: drawn
    by `seed`."""
    init_sha256: str | None = None
    """Of those weights; `sweep` writes it, and a run refuses others."""


@dataclass
class DataConfig:
    path: str | None = None
    """A folder that `asyncpp data prepare` wrote; token shards of llm.c, modded-nanogpt or nanoGPT (a .bin
    file or a folder of them) or of Megatron-LM (the .bin beside its .idx); or a text file or a folder of
    them, read as bytes. null: the text of the Python standard library."""
    sha256: str | None = None
    """Of that data as it is split; `sweep` writes it, and a run refuses other data."""
    context: int = 128
    """Tokens in a sequence."""
    validation_share: float = 0.05
    """Share held out where the data is not split already: of text by whole files where there are several, of
    token shards the end."""


@dataclass
class ParallelConfig:
    stages: int = 2
    """Pipeline ranks; each holds one stage, or `schedule.chunks` of them."""
    cut: list[int] | None = None
    """Blocks of each stage, in order; null: stages of equal cost."""
    data: int = 1
    """Replicas of the pipeline, each with micro-batches of its own: a run has `stages` x `data` processes."""


@dataclass
class TrainConfig:
    steps: int = MISSING
    """Steps of `schedule.microbatches` micro-batches each, on every one of `parallel.data` pipelines."""
    microbatch_size: int = 8
    """Sequences in a micro-batch."""
    eval_interval: int = 100
    """Steps between evaluations; the pipeline drains for each. There is always one at the end."""
    eval_microbatches: int = 8
    """Micro-batches of validation text in an evaluation."""
    clip: str = "global"
    """`global` (norm over all stages), `stage` (each stage by its own norm) or `none`."""
    clip_norm: float = 1.0
    max_skipped: int = 20
    """Updates in a row that are left out because a gradient is not finite, after which the run ends as
    failed; 0: it never does."""
    precision: str = "float32"
    """`float32`, `float64` (tests), or `bfloat16` (replicas; the master copy and the gradients are
    float32)."""
    recompute: bool = False
    """Keep the input of each block alone, and run the block again in backward: fewer activations in memory
    for a third more computing. Without a stash (`paci`) that changes the numbers: the second run reads the
    newest weights."""
    compile: bool = False
    """Run what torch.compile makes of a block. Needs a C++ compiler where the run is; the first step takes
    up to a minute longer."""
    deterministic: bool = False
    """On a GPU: let torch take kernels alone that give the same bits every time, which may be slower, and
    fail where an operator has none. On a CPU a run computes the same bits anyway."""
    checkpoint_interval: int = 100
    """Steps between checkpoints; the pipeline drains for each, which moves the numbers of `pipedream` and
    `paci` a little. 0: only at the end, and when the run is told to end."""


@dataclass
class SiteConfig:
    device: str = "auto"
    """`auto` (CUDA if there is one), `cpu` or `cuda`."""
    threads: int = 1
    """CPU threads a process computes with."""
    timeout: float = 60.0
    """Seconds without a message from a neighbour after which a process gives up. After twice as many in which
    it has done nothing at all it says where it stands, and ends."""
    start_timeout: float = 600.0
    """Seconds that all processes of a run may take to start, to find each other and to build their stages."""
    grace: float = 30.0
    """Seconds that a run told to end may take to save itself."""
    save_timeout: float = 1800.0
    """Seconds that reading or writing a checkpoint may take on the slowest disk."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints a run keeps."""
    peak_tflops: float | None = None
    """What a device could compute at the run's precision, in TFLOP/s, for the report's MFU; null: looked up
    by the device's name."""
    memory_gb: float | None = None
    """Memory that a device gives to a rank, 10^9 bytes: `sweep` refuses what does not fit. null: it does not
    ask."""
    gpu: str | None = None
    """What a rank computes on (h100, a100, ...), for the step time that `sweep` shows; null: not shown."""


@dataclass
class RunConfig:
    """Everything that decides what a run computes, and `site`."""

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
    """Seeds the initial weights (together with each parameter's name) and the order of the data."""


def optimizer_options(config: OptimizerConfig) -> dict[str, float | bool | str]:
    """The options of the optimizer that the configuration sets; the rest keep the method's defaults."""
    of_every_method = {"name", "lr", "weight_decay", "warmup", "final_lr"}
    options = {option.name: getattr(config, option.name) for option in fields(config)}
    return {
        name: value for name, value in options.items() if name not in of_every_method and value is not None
    }


def correction_options(config: CorrectionConfig) -> dict[str, float | bool | str]:
    """The options of the correction that the configuration sets; the rest keep its defaults."""
    options = {option.name: getattr(config, option.name) for option in fields(config)}
    return {name: value for name, value in options.items() if name != "name" and value is not None}


def tokens_per_step(config: RunConfig) -> int:
    """Tokens that one step reads (one optimizer step, all micro-batches of all pipelines)."""
    microbatches = config.schedule.microbatches * config.parallel.data
    return microbatches * config.train.microbatch_size * config.data.context
