"""The typed configuration of a run. Imports no torch, so that the command line checks it quickly.

Each field says what it accepts (`stages.config.keys.key`); its meaning and unit stand under it. `site` holds
what may differ from machine to machine without making it another run; everything else is part of the run's
identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import schedules
from optimizers import CORRECTIONS
from optimizers import NAMES as OPTIMIZERS
from stages.config.keys import MISSING, facts, key, option
from stages.config.places import DATA, NEIGHBOURS


@dataclass(frozen=True)
class ScheduleConfig:
    """Which program a run performs; `delay` and what follows are the options of schedules
    (`schedules.OPTIONS`)."""

    name: str = key(MISSING, choices=tuple(schedules.KNOWN), also="package.module:function")
    """A schedule of `schedules.NAMES`, or `package.module:function`: one of your own (docs/schedules.md)."""
    microbatches: int = key(4, low=1, high=100_000)
    """Micro-batches per step, in each pipeline."""
    replicas: int = key(2, low=2, high=10_000)
    """hsdp: groups of consecutive processes that each hold the whole model in shards; divides the
    processes."""
    keep_weights: bool = False
    """fsdp, hsdp: keep a block's gathered weights until its backward (torch's `reshard_after_forward:
    false`), and through a step's micro-batches unless `reduce_each`."""
    reduce_each: bool = False
    """fsdp, hsdp: reduce gradients after every micro-batch, so that no process keeps whole ones, instead of
    once per step."""
    code_sha256: str | None = None
    """Hash of the source of a schedule of your own (docs/run-folder.md#code)."""
    delay: int = key(1, low=1, high=1_000)
    """2bw, 2bw-v: updates between the weights of a gradient and those it is applied to. In 2bw a delay of 1
    needs at least `parallel.stages` - 1 micro-batches."""
    ahead: int = key(1, low=1, high=1_000)
    """2bw: forwards that a stage runs ahead of its backwards, for each stage after it. 2 hides late messages,
    keeps up to twice the activations, and needs twice as many micro-batches for a delay of 1. 2bw-v, paci-v:
    a message has `ahead` - 1 sixths of a micro-batch's time to arrive."""
    chunks: int = key(1, low=1, high=1_000)
    """interleaved-1f1b, looped-bfs: stages per rank."""
    split: bool = False
    """2bw-v: split backwards, for fewer activations."""
    costs: tuple[int, ...] | None = None
    """2bw-v, paci-v: times of a stage's forward and of both halves of its backward that the order is made
    for, whole numbers up to 24. null: [1, 1, 1]."""
    update_interval: int | None = key(None, low=1, high=100_000)
    """pipedream, paci, paci-v: micro-batches between a stage's updates. null: 1 for pipedream, `microbatches`
    for the others."""


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer, its learning rate, and the options of the optimizers (`asyncpp optimizers show NAME`):
    each takes some of them, and null stands for its own default."""

    name: str = key(MISSING, choices=OPTIMIZERS, also="package.module:name")
    """An optimizer of `optimizers.NAMES`, or `package.module:name`: one of your own (docs/optimizers.md)."""
    lr: float = key(2e-3, above=0)
    """Peak learning rate."""
    weight_decay: float = key(0.1, low=0)
    """Decoupled; on matrices only."""
    warmup: float = key(0.1, low=0, high=1)
    """Share of the steps in which the rate rises linearly."""
    final_lr: float = key(0.1, low=0)
    """Rate at the end, as a share of the peak."""
    schedule: str = key("cosine", choices=("cosine", "linear", "constant", "wsd"))
    """Rate after the warm-up: `cosine`, `linear`, `constant`, or `wsd` (stable, then a linear decay)."""
    decay_share: float | None = key(None, above=0, high=1)
    """wsd: share of the steps in which the rate decays. null: 0.2."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of an optimizer of your own: `optimizer.options.KEY`."""
    code_sha256: str | None = None
    """Hash of the source of an optimizer of your own."""
    momentum: float | None = option()
    nesterov: bool | None = option()
    beta1: float | None = option()
    beta2: float | None = option()
    eps: float | None = option()
    momentum_decay: float | None = option()
    momentum_weight: float | None = option()
    scale: str | None = option()
    iteration: str | None = option()
    precision: str | None = option()
    auxiliary_lr_ratio: float | None = option()
    row_beta2: float | None = option()
    row_eps: float | None = option()
    refresh_interval: int | None = option()
    beta3: float | None = option()
    gamma: float | None = option()
    vector_beta1: float | None = option()
    vector_beta2: float | None = option()
    radius: float | None = option()
    sign_radius: float | None = option()
    constrained: bool | None = option()
    source: str | None = option()
    geometry: str | None = option()
    stage_aware: bool | None = option()


@dataclass(frozen=True)
class ErrorFeedbackConfig:
    coefficient: float = key(0.0, low=0)
    """c in x' = x - u - c (u - u_previous); 0 turns the correction off."""
    form: str = key("look-ahead", choices=("look-ahead", "buffered"))
    """`look-ahead` (no extra buffer) or `buffered` (the reference)."""
    decay_at: str = key("y", choices=("y", "x"))
    """Weights that decay: `y` (evaluated and saved) or `x` (computed with; `buffered` only)."""


CORRECTION_NAMES = tuple(name for name, method in CORRECTIONS.items() if not method.set_by)
"""The corrections that `correction.name` accepts; error feedback has a section of its own."""


@dataclass(frozen=True)
class CorrectionConfig:
    """A correction for delay, and the options of all of them; null stands for a correction's own default."""

    name: str = key(
        "none",
        choices=("none", *CORRECTION_NAMES),
        set_by={name: method.set_by for name, method in CORRECTIONS.items() if method.set_by},
    )
    """A correction instead of error feedback."""
    flavour: str | None = option()
    reach: float | None = option()
    anneal: int | None = option()
    memory: float | None = option()
    strength: float | None = option()
    sync_steps: int | None = option()


@dataclass(frozen=True)
class ModelConfig:
    name: str = MISSING
    """Name of the model size, for display."""
    family: str = key("llama", choices=("llama", "qwen3"))
    """`llama`, or `qwen3` (queries and keys are normalized)."""
    layers: int = key(MISSING, low=1, high=10_000)
    """Number of blocks."""
    width: int = key(MISSING, low=1, high=10**6)
    """Width of the activations between blocks."""
    heads: int = key(MISSING, low=1, high=10**5)
    """Number of attention heads."""
    kv_heads: int = key(MISSING, low=1, high=10**5)
    """Key/value heads (grouped-query attention); divides `heads`."""
    head_dim: int | None = key(None, low=1, high=10**5)
    """Width of a head; null: `width` / `heads`."""
    mlp_width: int = key(MISSING, low=1, high=10**7)
    """Hidden width of the SwiGLU block."""
    vocab_size: int = key(256, low=1, high=2**31 - 1)
    """Number of tokens in the vocabulary."""
    tied: bool = False
    """The head uses the embedding's matrix (docs/models.md#tied-embeddings). Needs one stage, a schedule in a
    V, or `parallel.shard_head`."""
    rope_base: float = key(10000.0, low=1, high=1e15)
    """Base of the rotary frequencies."""
    norm_eps: float = key(1e-5, above=0, high=1.0)
    """Added to the mean square in RMSNorm."""
    init_std: float = key(0.02, above=0, high=10.0)
    """Standard deviation of initial matrices; over sqrt(2 `layers`) of those that write into the residual
    stream."""
    logit_softcap: float | None = key(None, above=0, high=1e6)
    """c: logits become c tanh(logits / c); null: none."""
    z_loss: float = key(0.0, low=0, high=1.0)
    """Weight of the mean squared logarithm of the softmax's sum in what is minimized; reported losses are
    without it."""
    parametrization: str = key("standard", choices=("standard", "mup"))
    """`mup`: a learning rate found at one size serves others (docs/models.md#rates-that-transfer)."""
    base_width: int | None = key(None, low=1, high=10**6)
    """mup: width of the base model."""
    base_layers: int | None = key(None, low=1, high=10_000)
    """mup: number of blocks of the base model; null: `layers`."""
    base_head_dim: int | None = key(None, low=1, high=10**5)
    """mup: width of a head of the base model; null: `head_dim`."""
    factory: str | None = None
    """`package.module:function` that makes a model of your own (docs/models.md)."""
    code_sha256: str | None = None
    """Hash of the source of a model of your own."""
    init: str | None = None
    """Initial weights: safetensors from `asyncpp export` or Hugging Face transformers, a folder or a file.
    null: random."""
    init_sha256: str | None = None
    """Hash of the weights in `init`."""
    experts: int = key(0, low=0, high=10**5)
    """Routed experts in a block, in place of its MLP; 0: a dense model."""
    active_experts: int | None = key(None, low=1, high=10**5)
    """Experts that each token is sent to."""
    shared_experts: int = key(0, low=0, high=10**4)
    """Further experts that every token passes."""
    expert_width: int | None = key(None, low=1, high=10**7)
    """Hidden width of an expert."""
    dense_layers: int = key(0, low=0, high=10_000)
    """First blocks with an MLP of `mlp_width` instead of experts."""
    router_score: str | None = key(None, choices=("sigmoid", "softmax"), also="null")
    """`sigmoid` (the default), or `softmax` over all experts."""
    route_normalised: bool | None = None
    """Divide the scores of a token's experts by their sum; null: true."""
    route_scale: float | None = key(None, above=0, high=1e6)
    """Factor of the routed experts' output; null: 1."""
    balance: str | None = key(None, choices=("bias", "none"), also="null")
    """`bias` (the default): a bias of the selection moves towards an even load after each step; `none`."""
    balance_rate: float | None = key(None, above=0, high=1.0)
    """Step of the balance bias; null: 0.001."""


OWN_SPLIT = "data"
"""Name of the data's own validation split among several validation sets."""


RAW_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
"""Types of tokens in files without a header."""


@dataclass(frozen=True)
class DataConfig:
    path: str | None = None
    """Prepared data, token shards, or text (docs/data.md). null: the text of the Python standard library, or
    `sources`."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """A mixture in place of `path`: `{wiki: PATH, code: PATH}` (docs/data.md)."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of `sources`, in any unit: `{wiki: 3, code: 1}`. A source without one has 1."""
    sha256: str | None = None
    """Hash of the data and its split."""
    context: int = key(128, low=1, high=10**7)
    """Tokens in a sequence."""
    validation_share: float = key(0.05, above=0, below=1)
    """Share held out if the data has no split of its own: whole files of a folder of text, the end of token
    shards."""
    dtype: str = key("auto", choices=("auto", *RAW_DTYPES))
    """Type of tokens in `.bin` files that do not say it, little-endian. `auto`: uint16; a file that seems to
    hold another is refused."""
    validation: Mapping[str, str] = field(default_factory=dict)
    """Further validation sets by name: `{wiki: PATH, code: PATH}` (docs/data.md)."""
    validation_sha256: Mapping[str, str] = field(default_factory=dict)
    """Hash of each of these sets."""
    headline: str = OWN_SPLIT
    """Validation set that the report compares: `data`, or a name in `validation`."""
    document_mask: bool = False
    """Attention stays within a document, and positions begin at 0 in each (docs/data.md)."""
    end_of_document: int | None = key(None, low=0, high=2**31 - 1)
    """With `document_mask`: the token that ends a document. null: as prepared data records it."""

    @property
    def trained_paths(self) -> dict[str, str]:
        """Paths of the data that is trained on, by key; none for the text of the Python standard library."""
        if self.sources:
            return {f"data.sources.{name}": path for name, path in self.sources.items()}
        return {} if self.path is None else {"data.path": self.path}


@dataclass(frozen=True)
class ParallelConfig:
    stages: int = key(2, low=1, high=10_000)
    """Pipeline ranks; each holds one stage, or `schedule.chunks` of them."""
    cut: tuple[float, ...] | None = None
    """Blocks in each stage, such as [5.5, 6.5]: .5 cuts between a block's attention and its MLP, and a last 0
    leaves the head alone. null: stages of equal cost, of whole blocks."""
    data: int = key(1, low=1, high=10_000)
    """Data-parallel replicas of the pipeline. A run has `stages` x `data` processes."""
    shard_head: bool = key(False)
    """The head's matrix in shards on all pipeline ranks, which compute the loss together
    (docs/parallel.md)."""
    shard_gradients: bool = key(False)
    """2bw and others with two gradients at a time: data ranks keep only their part of the one that is applied
    (docs/parallel.md)."""


@dataclass(frozen=True)
class TrainConfig:
    steps: int = key(MISSING, low=1, high=10**7)
    """Steps, of `schedule.microbatches` micro-batches on each of the `parallel.data` pipelines."""
    microbatch_size: int = key(8, low=1, high=10**5)
    """Sequences in a micro-batch."""
    eval_interval: int = key(100, low=1)
    """Steps between evaluations, for which the pipeline drains. A run ends with one."""
    eval_microbatches: int = key(8, low=1, high=10**6)
    """Most micro-batches of the data's own validation split per evaluation, as many as it has without
    overlap."""
    eval_tokens: int | None = key(None, low=1, high=10**12)
    """Least tokens that an evaluation reads of each validation set, if it has as many. null:
    `eval_microbatches` of the data's own split, 1,000,000 tokens of each set in `data.validation`."""
    clip: str = key("global", choices=("global", "stage", "none"))
    """Gradient clipping by the norm over all stages (`global`), of each stage (`stage`; needed where stages
    update apart, as in pipedream and paci) or `none`."""
    clip_norm: float = key(1.0, above=0, high=1e30)
    """Largest gradient norm after clipping."""
    ema_decay: float | None = key(None, above=0, below=1)
    """Decay of an exponential moving average of the weights, which evaluations measure, too
    (docs/optimizers.md#average-of-weights). null: none."""
    max_skipped: int = key(20, low=0)
    """Consecutive steps skipped for a non-finite gradient before the run fails; 0: it never does."""
    precision: str = key("float32", choices=("float32", "float64", "bfloat16"))
    """`float32`, `float64` (for tests), or `bfloat16` (master weights and gradients stay float32)."""
    recompute: str = key("none", choices=("none", "selective", "full"))
    """What backward computes again. `selective`: norms, rotary positions and SwiGLU's product, for half of
    the activations and a few per cent more time. `full`: all but each block's input, for a third more
    compute. Either changes the numbers without a weight stash (`paci`). `none`: nothing."""
    compile: bool | None = None
    """Compile the blocks with torch.compile. null: on a GPU, if the schedule and the machine allow it
    (docs/memory.md)."""
    cuda_graphs: bool = False
    """On a GPU, launch each forward and backward as one CUDA graph, for small models
    (docs/memory.md#traincuda_graphs)."""
    deterministic: bool = False
    """On a GPU, use only torch kernels that give the same bits every time; an operator without one is an
    error. CPU runs always do."""
    checkpoint_interval: int = key(100, low=0)
    """Steps between checkpoints, for which the pipeline drains: that changes the numbers of `pipedream` and
    `paci` slightly. 0: only at the end and when the run is stopped."""
    profile_steps: int = key(0, low=0, high=1000)
    """First steps of each attempt that torch's profiler records into `attempts/<n>/`; not in a replay. On a
    GPU a snapshot of memory, written if it runs out, then has the stacks of allocations."""


@dataclass(frozen=True)
class SiteConfig:
    device: str = key("auto", choices=("auto", "cpu", "cuda"))
    """`auto` (CUDA if there is one), `cpu` or `cuda`."""
    threads: int = key(1, low=1, high=10_000)
    """CPU threads per process."""
    timeout: float = key(60.0, above=0, high=1e8)
    """Seconds a process waits for a message. After twice as long without an action it dumps its stacks and
    exits."""
    start_timeout: float = key(600.0, above=0, high=1e8)
    """Seconds for all processes of a run to start, find each other, build and compile."""
    grace: float = key(30.0, above=0, high=1e6)
    """Seconds a run that is told to stop may take to save, before it is killed."""
    save_timeout: float = key(1800.0, above=0, high=1e8)
    """Seconds that reading or writing a checkpoint may take."""
    lease: float = key(60.0, above=0, high=1e8)
    """Seconds of silence after which another machine may take over a run. The file server must never be away
    for so long."""
    keep_checkpoints: int = key(2, low=1)
    """Newest checkpoints to keep."""
    peak_tflops: float | None = key(None, above=0)
    """Peak of a device at the run's precision in TFLOP/s, for the report's MFU. null: by the device's
    name."""
    memory_gb: float | None = key(None, above=0)
    """Memory of a rank in 10^9 bytes. `sweep` refuses cells that do not fit. null: no check."""
    runs_per_gpu: int | None = key(None, low=1)
    """Runs that share a GPU of this machine ([SLURM](slurm.md#runs-that-share-a-gpu)). null: one; with
    `launch --max-parallel` as many as fit as planned."""
    neighbours: str = key(DATA, choices=NEIGHBOURS)
    """Ranks that share a node: the data ranks of a stage (`data`), or those of a pipeline (`pipeline`;
    [where ranks run](parallel.md#where-ranks-run))."""
    gpu: str | None = None
    """GPU of each rank, by name or keys ([the device](plan.md#the-device)), for `sweep`'s estimates. null:
    none."""


@dataclass(frozen=True)
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
    seed: int = key(0, low=0, high=2**63 - 1)
    """Seed of the initial weights (with each parameter's name) and of the data order."""
    gone: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `GONE` that were not the default: part of the run's identity, and of nothing else."""


GONE = {"train.diagnostics": 0}
"""Keys in configurations of earlier versions, with their defaults."""


def changed(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The configuration with other values of some dotted keys, which are not checked."""
    sections: dict[str, dict[str, Any]] = {}
    for dotted, value in settings.items():
        section, _, name = dotted.rpartition(".")
        sections.setdefault(section, {})[name] = value
    own = sections.pop("", {})
    own |= {name: replace(getattr(config, name), **values) for name, values in sections.items()}
    return replace(config, **own) if own else config


def optimizer_options(config: OptimizerConfig) -> dict[str, float | bool | str]:
    """The optimizer options that the configuration sets; the others keep their defaults."""
    return {**declared_options(config), **config.options}


def correction_options(config: CorrectionConfig) -> dict[str, float | bool | str]:
    """The correction options that the configuration sets; the others keep their defaults."""
    return declared_options(config)


def chosen_correction(config: RunConfig) -> tuple[str, dict[str, float | bool | str]] | None:
    """The run's correction by its name in `optimizers.CORRECTIONS`, and its options; None: plain delay.

    The section `error_feedback` is the short form of the two corrections of that name.
    """
    if config.correction.name != "none":
        return config.correction.name, correction_options(config.correction)
    feedback = config.error_feedback
    if feedback.coefficient == 0:
        return None
    if feedback.form == "look-ahead":
        return "error-feedback", {"coefficient": feedback.coefficient}
    return "error-feedback-buffered", {"coefficient": feedback.coefficient, "decay_at": feedback.decay_at}


def declared_options(section: OptimizerConfig | CorrectionConfig) -> dict[str, float | bool | str]:
    """The options of the catalogue that a section sets."""
    options = {name: getattr(section, name) for name in _OPTION_NAMES[type(section)]}
    return {name: value for name, value in options.items() if value is not None}


_OPTION_NAMES = {
    section: tuple(entry.name for entry in fields(section) if facts(entry).option)
    for section in (OptimizerConfig, CorrectionConfig)
}


EVAL_TOKENS = 1_000_000
"""Tokens that an evaluation reads of a set in `data.validation`, if `train.eval_tokens` does not say."""


def eval_microbatches(config: RunConfig, name: str, *, tokens: int) -> int:
    """Micro-batches per evaluation of the validation set `name`, which has so many tokens.

    Without overlap: a window that is read twice would make the loss look more certain than it is.
    """
    size, context = config.train.microbatch_size, config.data.context
    wanted = -(-(config.train.eval_tokens or EVAL_TOKENS) // (size * context))
    if config.train.eval_tokens is None and name == OWN_SPLIT:
        wanted = config.train.eval_microbatches
    return max(1, min((tokens - 1) // context // size, wanted))


def tokens_per_step(config: RunConfig) -> int:
    """Tokens per optimizer step, over all micro-batches of all pipelines."""
    microbatches = config.schedule.microbatches * config.parallel.data
    return microbatches * config.train.microbatch_size * config.data.context
