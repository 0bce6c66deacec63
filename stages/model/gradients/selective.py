"""Selective recomputation: cheap parts of a block run again in backward, and their activations are not kept.

Cheap are norms, rotary positions and SwiGLU's product: few operations for about half of a block's
activations. Kept is what they are computed from, outputs of matrices and the residual stream, and what
attention returns. Korthikanti et al. (arXiv 2205.05198, section 5) compute attention again instead, which a
fused kernel does anyway.

torch's selective checkpointing caches an operator's output whether or not a backward reads it: here a
block's last product, and with experts a row for each expert of a token. So it serves where a compiler drops
what nobody reads (`stages.model.runner`). Here each tensor that autograd saves of a cheap part is
replaced by a place holder; the part runs again when the first of them is needed, with the weights that its
module has then.

    run_selectively(block)     torch calls `_BlockForward.pack` for each tensor that autograd saves
    cheap(function, *given)    in it, what is saved, and its output, becomes a place holder, a `_Saved`
    backward                   torch calls `_unpack`: the first `_Saved` of a part runs it again, fills all
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Restore = Callable[[Tensor, list[Tensor]], Tensor]
"""Makes a saved tensor from a part's output and from all that autograd saves within the part."""


class Watcher(Protocol):
    """Notified of what is kept and what is computed again."""

    def keep(self, tensor: Tensor) -> object:
        """A tensor is kept from forward to backward."""

    def make_again(self, tensors: list[Tensor]) -> None:
        """A part has run again, and made these tensors; some are the part's arguments."""


class _CheapPart:
    """One use of a cheap function in a block's forward."""

    def __init__(self, function: Callable[..., Tensor], given: tuple[Tensor, ...]) -> None:
        self._function = function
        self._given = [(tensor.detach(), tensor.requires_grad) for tensor in given]
        self._saved: list[ReferenceType[_Saved]] = []

    def save(self, restore: Restore) -> _Saved:
        """A place holder for a tensor that `restore` makes once the part has run again."""
        saved = _Saved(self, restore)
        self._saved.append(ref(saved))
        return saved

    def save_next(self) -> _Saved:
        """A place holder for a tensor that autograd saves within the part."""
        number = len(self._saved)
        return self.save(lambda _output, inner: inner[number])

    def run_again(self) -> None:
        """Run, and fill the place holders that autograd still has."""
        inner: list[Tensor] = []
        with torch.enable_grad(), saved_tensors_hooks(lambda saved: inner.append(saved.detach()), _unused):
            given = [tensor.detach().requires_grad_(wanted) for tensor, wanted in self._given]
            output = self._function(*given).detach()
        for reference in self._saved:
            if (saved := reference()) is not None:
                saved.value = saved.restore(output, inner)
        if _watcher is not None:
            _watcher.make_again([output, *inner])


class _Saved:
    """Place holder for a tensor that autograd saved."""

    def __init__(self, part: _CheapPart, restore: Restore) -> None:
        self.part = part
        self.restore = restore
        self.value: Tensor | None = None

    def take(self) -> Tensor:
        """The tensor, once; backward asks for each a single time."""
        if self.value is None:
            self.part.run_again()
        value, self.value = self.value, None
        assert value is not None
        return value


class _BlockForward:
    """The forward of one block. It holds the outputs of its cheap parts, by which autograd's savings are
    recognised."""

    def __init__(self) -> None:
        self._running: _CheapPart | None = None
        self._outputs: dict[int, tuple[_CheapPart, Tensor]] = {}

    def run(self, function: Callable[..., Tensor], given: tuple[Tensor, ...]) -> Tensor:
        for tensor in given:
            _note_kept(tensor)
        part = self._running = _CheapPart(function, given)
        output = function(*given)
        self._running = None
        self._outputs[output.untyped_storage()._cdata] = part, output
        return output

    def release(self) -> None:
        """Let go of the outputs, at the block's end."""
        self._outputs.clear()

    def pack(self, tensor: Tensor) -> Tensor | _Saved:
        """What autograd keeps in the place of a tensor that it saves."""
        if self._running is not None:
            return self._running.save_next()
        made = self._outputs.get(tensor.untyped_storage()._cdata)
        if made is None:
            _note_kept(tensor)
            return tensor.detach()
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        return made[0].save(lambda output, _inner: output.as_strided(size, stride, offset))


_current: _BlockForward | None = None
_watcher: Watcher | None = None


def cheap(function: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """`function(*given)`, a cheap part of a block: under selective recomputation backward computes it again.

    Args:
        function: one tensor of tensors, deterministic, and without a part of its own or a matrix whose
            gradient may be deferred.
        given: its arguments, which are kept.
    """
    return function(*given) if _current is None else _current.run(function, given)


def run_selectively(block: nn.Module, *given: Any) -> Any:
    """Run a block whose cheap parts are computed again in backward."""
    global _current
    if not torch.is_grad_enabled():
        return block(*given)
    _current = _BlockForward()
    try:
        with saved_tensors_hooks(_current.pack, _unpack):
            return block(*given)
    finally:
        # Autograd keeps the hook, and so this forward, until the backward.
        _current.release()
        _current = None


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Notify `watcher` in this context."""
    global _watcher
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None


def _note_kept(tensor: Tensor) -> None:
    if _watcher is not None:
        _watcher.keep(tensor)


def _unpack(packed: Tensor | _Saved) -> Tensor:
    return packed.take() if isinstance(packed, _Saved) else packed


def _unused(_packed: None) -> Tensor:
    raise AssertionError("a part that runs again has no backward of its own")
