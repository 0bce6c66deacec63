"""A user's own model: embedding, blocks and head from a function that `model.factory` names.

The function is imported and called; a configuration contains no code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from optimizers.named import import_named
from stages.config.run_config import ModelConfig
from stages.data.documents import Documents
from stages.model.decoder import Place, RunBlock, Stage, run_as_it_stands
from stages.model.experts import Routing
from stages.model.head_loss import next_token_loss
from stages.shape.head import split_name
from stages.shape.partition import StageCut, cut_model

Parts = tuple[nn.Module, Sequence[nn.Module], nn.Module]
Factory = Callable[[ModelConfig, int], Parts]
"""Makes (embedding, blocks, head) from the section `model` and the tokens in a sequence.

The embedding takes token ids `(batch, context)`; it and every block return activations `(batch, context,
width)`; the head returns logits `(batch, context, vocab_size)`. There are as many blocks as the configuration
has layers. No parameter is in two of them.
"""


class FactoryError(ValueError):
    """The function that `model.factory` names cannot be used."""


class OwnStage(Stage):
    """The part of a user's model that one stage computes.

    Parameters are called `embedding.*`, `blocks.<number>.*` and `head.*`, whatever the cut.

    Raises:
        FactoryError: the factory cannot be imported, or returns something else.
    """

    def __init__(self, config: ModelConfig, cut: StageCut, *, context: int) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.context = context
        self._cut = cut
        self._dtype = torch.get_default_dtype()
        embedding, blocks, head = _parts(config, context)
        self.embedding = embedding if cut.has_embedding else None  # type: ignore[assignment]
        self.blocks = nn.ModuleDict({str(index): blocks[index] for index in cut.blocks})
        self.norm = None
        self.head = head if cut.has_head else None  # type: ignore[assignment]
        self.rotation = None
        self.run_block = run_as_it_stands
        if not any(True for _ in self.parameters()):
            held = ", ".join(f"block {index}" for index in cut.blocks)
            raise FactoryError(
                f"{config.factory}: a stage of {held or 'no block'} has no parameters; accepted: at least "
                "one in each stage (parallel.cut, parallel.stages)"
            )

    def prepare(self, *, device: torch.device, dtype: torch.dtype) -> None:
        """Fill buffers, and other tensors that modules keep, with the values that the factory computes; on
        the meta device they have none."""
        self._dtype = dtype
        kept = list(self._kept())
        if not kept:
            return
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            real = type(self)(self.config, self._cut, context=self.context)
        for owner, name in kept:
            value = getattr(real.get_submodule(owner), name).detach().to(device)
            setattr(self.get_submodule(owner), name, value.to(dtype) if value.is_floating_point() else value)

    def _kept(self) -> Iterator[tuple[str, str]]:
        """Module and name of each buffer, and of each tensor without values that is a mere attribute; not of
        those computed from parameters, as `torch.nn.utils.weight_norm` has them."""
        for owner, module in self.named_modules():
            for name, _ in module.named_buffers(recurse=False):
                yield owner, name
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and value.is_meta and value.is_leaf:
                    yield owner, name

    def forward(
        self,
        x: Tensor,
        routing: Routing | None = None,
        *,
        targets: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        assert documents is None  # validation refuses masks
        shape = (*x.shape[:2], self.config.width)
        part = "block 0"
        if self.embedding is not None:
            x = self._checked(self.embedding(x), "the embedding", self.config.width)
        for index in self.blocks:
            part = f"block {index}"
            x = self._checked(
                self.apply_block(index, x, routing, (None,), run=self.run_block), part, self.config.width
            )
        if self.head is not None:
            logits = self._checked(self.head(x), "the head", self.config.vocab_size)
            return logits if targets is None else next_token_loss(logits, targets)
        if x.shape != shape or x.dtype != self._dtype:
            raise FactoryError(
                f"{self.config.factory}: {part}, the last of its stage, hands on {list(x.shape)} of "
                f"{x.dtype}, must be {list(shape)} of {self._dtype} (train.precision)"
            )
        # Messages are sent contiguous; replay computes with the same layout.
        return x.contiguous()

    def apply_block(
        self, index: str, x: Tensor, routing: Routing | None, place: Place, *, run: RunBlock
    ) -> Tensor:
        out: Tensor = run(self.blocks[index], x)
        return out

    def _checked(self, x: Tensor, part: str, width: int) -> Tensor:
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != width:
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise FactoryError(
                f"{self.config.factory}: {part} returns {shape}, must be a tensor (batch, context, {width})"
            )
        return x


def make_stage(config: ModelConfig, cut: StageCut, *, context: int) -> Stage:
    """The stage's module: of our decoder, or of the user's own model.

    Raises:
        FactoryError: as `OwnStage`.
    """
    return (Stage if config.factory is None else OwnStage)(config, cut, context=context)


MOST_VALUES = 1 << 25
"""Parameter values of a model that `check_causal` computes; of a larger one it computes a small twin."""


def check_causal(config: ModelConfig, *, context: int) -> str | None:
    """Compute a user's model on this machine, with random weights and few tokens, and check that no output
    depends on a later token or on another sequence.

    Returns:
        Why it could not be computed here, such as kernels for GPUs alone; None: it was.

    Raises:
        FactoryError: it is not so, or the factory returns something else than it must.
    """
    tokens = min(context, 128)
    try:
        with torch.device("meta"):
            values = sum(parameter.numel() for parameter in _whole(config, tokens).parameters())
        if values > MOST_VALUES:
            config = replace(
                config,
                width=32,
                heads=2,
                kv_heads=2 if config.kv_heads == config.heads else 1,
                head_dim=None,
                mlp_width=64,
                layers=min(config.layers, 4),
                vocab_size=min(config.vocab_size, 256),
            )
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            torch.manual_seed(0)
            module = _whole(config, tokens)
            for parameter in module.parameters():
                # Such that every part counts, whatever the factory draws.
                if parameter.ndim < 2:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(std=parameter[0].numel() ** -0.5)
            leak = future_seen(module, vocabulary=config.vocab_size, tokens=tokens)
    except (Exception, SystemExit) as error:
        if isinstance(error, FactoryError) and error.__cause__ is None:
            raise
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    if leak:
        raise FactoryError(
            f"{config.factory}: {leak}; accepted: a causal model, such as attention with is_causal=True or "
            "convolutions that are padded on the left alone"
        )
    return None


def _whole(config: ModelConfig, context: int) -> OwnStage:
    (cut,) = cut_model(config, stages=1, context=context)
    return OwnStage(config, cut, context=context)


def future_seen(module: Callable[[Tensor], Tensor], *, vocabulary: int, tokens: int) -> str | None:
    """On which token that it must not see an output of a decoder depends, in words; None: on none.

    One token at a time is changed, and the logits before it and of another sequence are compared.

    Args:
        module: takes token ids `(batch, tokens)` and returns logits `(batch, tokens, vocabulary)`.
        vocabulary: number of different tokens.
        tokens: in a sequence.
    """
    given = torch.randint(vocabulary, (2, tokens))

    def logits(ids: Tensor) -> Tensor:
        torch.manual_seed(0)  # what is random, such as dropout, is the same in each
        return module(ids)

    expected = logits(given)
    if not expected.isfinite().all():
        raise ValueError("with random weights it gives logits that are not finite")
    # Rounding may differ, as where experts are met by other numbers of tokens.
    most = 1e-4 * expected.abs().max()
    for place in sorted({tokens - 1, max(0, tokens - 2), tokens // 2, tokens // 3}):
        changed = given.clone()
        changed[0, place] = (changed[0, place] + 1) % vocabulary
        differ = (logits(changed) - expected).abs().amax(-1) > most
        if differ[0, :place].any():
            earlier = int(differ[0, :place].nonzero()[-1])
            return f"the output at token {earlier} depends on token {place}, which comes later"
        if differ[1].any():
            return "the outputs of one sequence depend on the tokens of another"
    return None


def _factory(named: str) -> Factory:
    try:
        factory: Factory = import_named(named)
    except (ImportError, AttributeError) as error:
        raise FactoryError(f"{named} cannot be imported ({error})") from error
    if not callable(factory):
        raise FactoryError(f"{named} is {type(factory).__name__}, must be a function")
    return factory


def _parts(config: ModelConfig, context: int) -> Parts:
    named = str(config.factory)
    try:
        parts = _factory(named)(config, context)
    except SystemExit as leaving:
        raise FactoryError(f"{named} ended the process (SystemExit: {leaving.code})") from leaving
    except FactoryError:
        raise
    except Exception as error:
        raise FactoryError(f"{named} fails ({type(error).__name__}: {error})") from error
    if not isinstance(parts, tuple) or len(parts) != 3:
        raise FactoryError(f"{named} must return (embedding, blocks, head), not {type(parts).__name__}")
    embedding, blocks, head = parts
    if not isinstance(blocks, Sequence | nn.ModuleList):
        raise FactoryError(f"{named}: the blocks are {type(blocks).__name__}, must be a list")
    of_blocks = {f"block {index}": block for index, block in enumerate(blocks)}
    for what, module in {"embedding": embedding, **of_blocks, "head": head}.items():
        if not isinstance(module, nn.Module):
            raise FactoryError(f"{named}: {what} is {type(module).__name__}, must be a torch.nn.Module")
    if len(blocks) != config.layers:
        raise FactoryError(f"{named} returns {len(blocks)} blocks, and model.layers is {config.layers}")
    whole = nn.ModuleDict({"embedding": embedding, "blocks": nn.ModuleList(blocks), "head": head})
    once = {name for name, _ in whole.named_parameters()}
    for name, _ in whole.named_parameters(remove_duplicate=False):
        if name not in once:
            raise FactoryError(f"{named}: {name} is another parameter, too; stages cannot share parameters")
    for name, parameter in whole.named_parameters():
        if split_name(name)[1] is not None:
            raise FactoryError(
                f"{named}: the name {name} reads as rows of a matrix in checkpoints; accepted: names without "
                "[first:end]"
            )
        # The updates train all parameters, and initial values are drawn.
        if not parameter.requires_grad:
            raise FactoryError(
                f"{named}: {name} is not trained (requires_grad is False), and all parameters "
                "are; accepted: a buffer (register_buffer)"
            )
    return parts
