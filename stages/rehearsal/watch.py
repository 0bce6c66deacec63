"""Watches every operator on fake tensors: live memory by kind, waits of the host, types, FLOPs."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

CPU = torch.device("cpu")
TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent)
aten = torch.ops.aten

ALIGNMENT = 512
"""Bytes that torch's allocator for GPUs rounds every tensor up to."""

_PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten._grouped_mm: 0, aten.addmm: 1, aten.baddbmm: 1}
"""Operators that multiply matrices, with the place of the first among their arguments. In a grouped product
each row, or each column of a gradient, meets one matrix."""

_AS_ON_A_GPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operators of blocks that were traced on a CPU, and those of a GPU, whose FLOPs torch counts."""


@dataclass(frozen=True)
class Finding:
    """Something that a GPU would not do, or not fast."""

    kind: str
    """`wait` (the host waits for the device), `type`, `device` or `error`."""
    what: str
    where: str
    """File and line outside of torch."""
    phase: str
    """What the rank did: `build`, `warm-up`, an op of the program, `update`, `evaluation`, `checkpoint`."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches one rank.

    Args:
        device: `cuda` or `cpu`; of the tensors that are counted.
        wide: whether float64 is the run's own type.
        tokens: of a micro-batch. Only float64 tensors with more values are found: norms are added up in it.
    """

    def __init__(self, device: str, *, wide: bool, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self._wide = wide
        self._tokens = tokens
        self.phase = "build"
        self.findings: Counter[Finding] = Counter()
        self.notes: dict[str, None] = {}
        """Remarks, each once."""
        self.flops: Counter[str] = Counter()
        """FLOPs by phase."""
        self.bytes: Counter[str] = Counter()
        """Live bytes on the device, by kind."""
        self.peak: Counter[str] = Counter()
        """`bytes` when their sum was largest."""
        self.peak_phase = ""
        self.temporaries: dict[str, int] = {}
        """The most bytes of kind `temporary` in each phase."""
        self._total = self._peak_total = 0
        self._live: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self._young: set[int] | None = None
        self._pinned: set[int] = set()
        self._cpu_is_gpu: bool | None = None
        """Whether operators that name the CPU mean the GPU (`meaning`); None outside of calls from Python."""

    # --- told from outside -------------------------------------------------------------------------------

    @contextmanager
    def during(self, phase: str, *, leaves: str) -> Iterator[None]:
        """A block of one phase; tensors that are made in it and outlive it are of kind `leaves`."""
        before, self.phase = self.phase, phase
        outer, self._young = self._young, set()
        try:
            yield
        finally:
            # A block within this one may have dropped what was made before it.
            for key in self._young & self._live.keys():
                if self._live[key][2] == "temporary":
                    self._relabel(key, leaves)
            self.phase, self._young = before, outer

    def label(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count the storages of these tensors as `kind`."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            self._relabel(key, kind)
            if self._young is not None:
                self._young.discard(key)

    def label_rest(self, kind: str) -> None:
        """Count all that lives and has no kind yet as `kind`."""
        for key, (_, _, before) in list(self._live.items()):
            if before == "temporary":
                self._relabel(key, kind)

    def resized(self, tensor: Tensor) -> None:
        """Note that the storage of a tensor has got another size."""
        storage = tensor.untyped_storage()
        if (key := storage._cdata) in self._live:
            reference, before, kind = self._live[key]
            size = _allocated(storage)
            self._live[key] = (reference, size, kind)
            self.bytes[kind] += size - before
            self._total += size - before
            self._note_peak()

    def begin_peak(self) -> None:
        """Forget the peak so far."""
        self._peak_total = self._total
        self.peak, self.peak_phase = self.bytes.copy(), self.phase
        self.temporaries.clear()

    @property
    def peak_total(self) -> int:
        return self._peak_total

    def note(self, remark: str) -> None:
        """Keep a remark."""
        self.notes[remark] = None

    def found(self, kind: str, what: str, *, where: str | None = None) -> None:
        """Count a finding."""
        self.findings[Finding(kind, what, where or _caller(), self.phase)] += 1

    def synchronized(self, what: str) -> None:
        """The host has waited for the device."""
        self.found("wait", what)

    @contextmanager
    def meaning(self, *, gpu: bool) -> Iterator[None]:
        """A call from Python.

        Args:
            gpu: whether operators in it that name the CPU mean the GPU, as C++ has been told that tensors are
                on the CPU; if not, devices are meant as they are written.
        """
        before, self._cpu_is_gpu = self._cpu_is_gpu, gpu
        try:
            yield
        finally:
            self._cpu_is_gpu = before

    def pinned_copy(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory."""
        copy = torch.empty_like(tensor)
        self._pinned.add(copy.untyped_storage()._cdata)
        return copy

    # --- operators ---------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return told(args[0])
        if (body := _BODIES.get(func)) is not None:
            # What it does on a GPU, not only the shape of its result.
            with self:
                return body(*args, **kwargs)
        if kwargs.get("device") == CPU and self.device == "cuda" and self._means_gpu():
            if not args or not isinstance(args[0], FakeTensor):
                kwargs = kwargs | {"device": torch.device("cuda", 0)}
            elif args[0].fake_device.type == "cuda":
                kwargs = kwargs | {"device": args[0].fake_device}
        if func in (aten._local_scalar_dense.default, aten.item.default):
            return self._number(args[0])
        self._look_for_waits(func, args, kwargs)
        try:
            out = _FORMS[func](*args, **kwargs) if func in _FORMS else func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.found("wait", f"{func}: the size or value of its result is needed by the host")
            raise
        if func is aten.add_.Tensor and isinstance(args[1], (int, float)) and args[0].fake_device == CPU:
            # A count of the host's own, such as an optimizer's steps.
            args[0].counted = getattr(args[0], "counted", 0.0) + args[1]
        kind = func._overloadpacket
        if (place := _PRODUCTS.get(kind)) is not None:
            first, second = args[place : place + 2]
            self.flops[self.phase] += 2 * first.numel() * second.shape[-1]
        elif (flops := flop_registry.get(_AS_ON_A_GPU.get(kind, kind))) is not None:
            self.flops[self.phase] += flops(*_with_equal_heads(func, args), **kwargs, out_val=out)
        self._take(out, func, kwargs)
        return out

    def _means_gpu(self) -> bool:
        if self._cpu_is_gpu is None:  # autograd's own operators are called by C++
            return torch._C._current_graph_task_id() != -1
        return self._cpu_is_gpu

    def _number(self, tensor: Tensor) -> float | int | bool:
        if tensor.device.type == "cuda":
            self.found("wait", "a number is read by the host (.item(), .tolist(), float(), if)")
        if tensor.dtype is torch.bool:
            return False
        counted: float = getattr(tensor, "counted", 0.0)
        return counted if tensor.dtype.is_floating_point else int(counted)

    def _look_for_waits(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func is aten._to_copy.default:
            source, target = args[0], kwargs.get("device") or args[0].device
            host, pinned = args[0], target.type == "cuda"
        elif func is aten.copy_.default:
            source, target = args[1], args[0].device
            host, pinned = (args[0] if target.type == "cpu" else source), True
        else:
            return
        between = {source.device.type, target.type}
        if between != {"cpu", "cuda"}:
            return
        non_blocking = kwargs.get("non_blocking", False) or (len(args) > 2 and bool(args[2]))
        if non_blocking and pinned and host.untyped_storage()._cdata in self._pinned:
            return
        direction = "to the host" if target.type == "cpu" else "to the device"
        self.found("wait", f"a copy {direction} that is not asynchronous from or to pinned memory")

    # --- memory ------------------------------------------------------------------------------------------

    def _take(self, out: Any, func: Any, kwargs: dict[str, Any]) -> None:
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(tensor, FakeTensor):
                continue
            if kwargs.get("pin_memory"):
                self._pinned.add(tensor.untyped_storage()._cdata)
            if tensor.fake_device.type != self.device:
                continue
            if (
                self.device == "cuda"
                and tensor.dtype is torch.float64
                and not self._wide
                and tensor.numel() > self._tokens
            ):
                self.found("type", f"{func} makes float64 {list(tensor.shape)}")
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._live:
                continue
            size = _allocated(storage)
            self._live[key] = (weakref.ref(storage, self._dropper(key)), size, "temporary")
            if self._young is not None:
                self._young.add(key)
            self.bytes["temporary"] += size
            self._total += size
            self.temporaries[self.phase] = max(self.temporaries.get(self.phase, 0), self.bytes["temporary"])
            self._note_peak()

    def _note_peak(self) -> None:
        # Of equally full moments the last: in the first, an optimizer's state is still a temporary.
        if self._total >= self._peak_total:
            self._peak_total, self.peak_phase = self._total, self.phase
            self.peak = self.bytes.copy()

    def _dropper(self, key: int) -> Callable[[Any], None]:
        def drop(_: Any) -> None:
            _, size, kind = self._live.pop(key)
            self.bytes[kind] -= size
            self._total -= size
            if self._young is not None:
                self._young.discard(key)

        return drop

    def _relabel(self, key: int, kind: str) -> None:
        if key not in self._live:
            return
        storage, size, before = self._live[key]
        self.bytes[before] -= size
        self.bytes[kind] += size
        self._live[key] = (storage, size, kind)


def _allocated(storage: torch.UntypedStorage) -> int:
    """Bytes that torch's allocator for GPUs takes for a storage."""
    return -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT


def _with_equal_heads(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """Arguments of an operator; of attention with keys and values that have as many heads as the queries.

    torch 2.11 counts the FLOPs of no others.
    """
    if "scaled_dot_product" not in func.name():
        return [*args]
    shared = [isinstance(each, Tensor) and each.ndim == 4 for each in args]
    heads = max(each.shape[1] for each, is_shared in zip(args, shared, strict=True) if is_shared)
    return [
        each.repeat_interleave(heads // each.shape[1], dim=1) if is_shared else each
        for each, is_shared in zip(args, shared, strict=True)
    ]


def _rms_norm(x: Tensor, shape: list[int], *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[: x.ndim - len(shape)], 1), dtype=torch.float32)


def _rms_norm_backward(
    gradient: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor | None]:
    return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


_FORMS: dict[Any, Callable[..., Any]] = {
    aten._fused_rms_norm.default: _rms_norm,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
    aten.addmm.dtype_out: lambda *_, out, **__: out,
}
"""Results of operators that some versions of torch would make on the device of which C++ is told, or cannot
make with fake tensors."""


def told(tensor: FakeTensor) -> torch.device:
    """The device that C++ is told a tensor is on (`stages.rehearsal.fake_gpu`)."""
    return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else CPU


def _caller() -> str:
    """File and line of the nearest frame outside of torch and of this package."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith((TORCH, HERE, "<")) and "contextlib" not in name:
            return f"{shortened(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


def shortened(file: str) -> str:
    """A path from the package's folder on."""
    parts = Path(file).parts
    for package in ("stages", "optimizers"):
        if package in parts:
            return str(Path(*parts[len(parts) - 1 - parts[::-1].index(package) :]))
    return file


def _bodies() -> dict[Any, Callable[..., Any]]:
    from stages.model.document_attention import document_attention, document_attention_gradients
    from stages.model.grouped import stack_gradient, times_stack

    operators = (times_stack, stack_gradient, document_attention, document_attention_gradients)
    return {op._opoverload: op._init_fn for op in operators}


_BODIES = _bodies()
