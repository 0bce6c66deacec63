"""A GPU that has no memory and computes nothing: torch's fake tensors whose device is `cuda`.

`FakeTensorMode` does forwards on such tensors and checks their devices, also where torch is built without
CUDA. It cannot do backwards: autograd asks C++ for the queue of each tensor's device, which needs a driver.
So here C++ is told that every tensor is on the CPU; Python and the fake tensors' own checks know better.
What C++ then gets wrong (it chooses attention kernels and creates tensors by device) is put right here.

Everything this touches of torch is put back at the end of the block.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode

from stages.model import document_attention, runner
from stages.pipeline import cuda_graphs
from stages.rehearsal.compiled import compile_on
from stages.rehearsal.watch import CPU, Watch, told

GPU = torch.device("cuda", 0)

FLASH_HEAD_DIM = 256
"""The widest head that torch's flash attention takes."""


@contextmanager
def fake_tensors(watch: Watch) -> Iterator[None]:
    """A block in which every tensor is fake and `watch` sees every operator."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # Of autocast, which checkpointing asks about the device.
        warnings.filterwarnings("ignore", message=".*CUDA is not available")
        for owner, name, value in _replacements(watch):
            stack.enter_context(patch.object(owner, name, value, create=True))
        # Also where fake tensors call C++ themselves.
        handlers: dict[Any, Any] = fake_tensor._DISPATCH_META_HANDLERS
        stack.enter_context(patch.dict(handlers, {torch.ops.prim.device.default: lambda args: told(args[0])}))
        # An optimizer runs its loops over whole lists for these types only.
        supported = torch_optimizer._foreach_supported_types
        supported.append(FakeTensor)
        stack.callback(supported.remove, FakeTensor)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=False))
        stack.enter_context(watch)
        stack.enter_context(_PythonCalls(watch))
        yield


def _replacements(watch: Watch) -> list[tuple[Any, str, Any]]:
    """What is replaced in torch: (owner, name, value)."""
    return [
        (FakeTensor, "is_cuda", property(lambda tensor: tensor.fake_device.type == "cuda")),
        (FakeTensor, "tolist", _listed),
        (FakeTensor, "record_stream", lambda tensor, stream: None),
        (FakeTensor, "pin_memory", lambda tensor, device=None: watch.pinned_copy(tensor)),
        (F, "scaled_dot_product_attention", _attention_of(watch, F.scaled_dot_product_attention)),
        (F, "rms_norm", _norm_of(F.rms_norm)),
        (nn.Module, "_apply", _applied),
        (_fsdp_param, "alloc_storage", _resizing(watch, _fsdp_param.alloc_storage)),
        (_fsdp_param, "free_storage", _resizing(watch, _fsdp_param.free_storage)),
        (FSDPParam, "to_accumulated_grad_if_needed", _keeping(watch)),
        (document_attention, "read_bounds", partial(_whole_sequences, watch)),
        (runner, "_compile", compile_on(watch)),
        (cuda_graphs, "recorder", lambda: _run_again),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Event),
        (torch.cuda, "current_device", lambda: GPU.index),
        (torch.cuda, "current_stream", _Stream),
        (torch.cuda, "stream", lambda stream: nullcontext()),
        (torch.cuda, "synchronize", lambda device=None: watch.synchronized("torch.cuda.synchronize")),
        (torch.cuda, "get_rng_state", lambda device=None: None),
        (torch.cuda, "set_rng_state", lambda state, device=None: None),
    ]


def _run_again(run: Callable[[], None]) -> Callable[[], None]:
    """In place of a CUDA graph: what it would have captured. Its memory is not kept between replays."""
    return run


def _resizing(watch: Watch, resize: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """`fully_shard` keeps the tensors of gathered weights, and gives their memory back between uses."""

    def resized(tensor: Tensor) -> None:
        resize(tensor)
        watch.label([tensor], "weights")
        watch.resized(tensor)

    return resized


def _keeping(watch: Watch) -> Callable[[FSDPParam], None]:
    """`fully_shard` keeps whole gradients until the last micro-batch of a step."""
    accumulate = FSDPParam.to_accumulated_grad_if_needed

    def keep(parameter: FSDPParam) -> None:
        accumulate(parameter)
        kept = (parameter.unsharded_accumulated_grad, parameter._unsharded_param.grad)
        watch.label((gradient for gradient in kept if gradient is not None), "gradients")

    return keep


def _applied(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """The module with `function` of each parameter and buffer in its place. `nn.Module._apply` would swap the
    tensors, which fake ones refuse."""
    for child in module.children() if recurse else ():
        cast(Any, child)._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(function(parameter.detach()), parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def _whole_sequences(watch: Watch, _: Tensor, query: Tensor) -> list[int]:
    watch.note("attention within documents: counted as if each sequence were one document")
    batch, context = query.shape[0], query.shape[2]
    return [number * context for number in range(batch + 1)]


class _Stream:
    """A stream: all work is in the order of the calls."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = device

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()


class _Event:
    """A point that the device has reached at once, a millisecond after any other."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end_event: Any) -> float:
        return 1.0


class _PythonCalls(TorchFunctionMode):
    """Calls of torch from Python, whose device is meant as it is written."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            with self:
                return torch.autograd.backward(args[0], kwargs.get("gradient"))
        if func is Tensor.to:
            return _moved(self._watch, *args, **kwargs)
        if func is Tensor.cpu:
            return _moved(self._watch, args[0], CPU)
        tensors = [part for part in _flat(args) if isinstance(part, Tensor)]
        of_autograd = sys._getframe(1).f_code.co_filename == torch.autograd.__file__
        if of_autograd and self._watch.device == "cuda" and kwargs.get("device") == CPU:
            # The gradient that a backward begins with, on the device of which C++ was told.
            kwargs["device"] = GPU
        named = "device" in kwargs or any(isinstance(part, torch.device) for part in args)
        with self._watch.meaning(gpu=not named and any(tensor.is_cuda for tensor in tensors)):
            return func(*args, **kwargs)


def _flat(args: tuple[Any, ...]) -> Iterator[Any]:
    for part in args:
        if isinstance(part, (tuple, list)):
            yield from part
        else:
            yield part


def _moved(watch: Watch, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    copy = kwargs.pop("copy", False)
    if args and isinstance(args[0], Tensor):
        device, dtype, non_blocking = args[0].device, args[0].dtype, False
    else:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype = device or tensor.device, dtype or tensor.dtype
    if device.type == "cuda":
        device = GPU
    if (device, dtype) == (tensor.device, tensor.dtype) and not copy:
        return tensor
    with watch.meaning(gpu=False):
        if device == tensor.device:
            return torch.ops.aten._to_copy(tensor, dtype=dtype)
        return torch.ops.aten._to_copy(tensor, dtype=dtype, device=device, non_blocking=non_blocking)


def _listed(tensor: Tensor) -> Any:
    return tensor.item() if tensor.ndim == 0 else [_listed(part) for part in tensor]


def _norm_of(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """On a GPU one kernel, also where torch is built for CPUs, which have none."""

    def norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        if not x.is_cuda:
            return plain(x, shape, weight, eps)
        return cast(Tensor, _FusedNorm.apply(x, weight))  # type: ignore[no-untyped-call]

    return norm


class _FusedNorm(torch.autograd.Function):
    """What the kernel keeps: its input, and the root mean square of each vector."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _attention_of(watch: Watch, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _attention(watch, query, *args, **kwargs) if query.is_cuda else plain(query, *args, **kwargs)

    return attention


def _attention(watch: Watch, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """By the kernel that torch chooses on a GPU: flash, memory-efficient, or products of whole matrices."""
    names = ("attn_mask", "dropout_p", "is_causal")
    options = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    options |= dict(zip(names, args, strict=False)) | kwargs
    causal, scale, grouped = options["is_causal"], options["scale"], key.shape[1] != query.shape[1]
    aten, plain = torch.ops.aten, options["attn_mask"] is None and options["dropout_p"] == 0.0
    half = query.dtype in (torch.float16, torch.bfloat16)
    if plain and half and query.shape[-1] <= FLASH_HEAD_DIM:
        watch.note("attention: the flash kernel")
        width = query.shape[-1]
        if missing := -width % 8:
            query, key, value = (F.pad(part, (0, missing)) for part in (query, key, value))
            scale = scale or width**-0.5
        out, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
        out = out[..., :width]
    elif plain and not grouped and query.dtype in (torch.float16, torch.bfloat16, torch.float32):
        watch.note("attention: the memory-efficient kernel")
        out, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, query.requires_grad, 0.0, causal, scale=scale
        )
    else:
        watch.note("attention: products of whole matrices, since no fused kernel takes its type and heads")
        if grouped:
            times = query.shape[1] // key.shape[1]
            key, value = (part.repeat_interleave(times, dim=1) for part in (key, value))
        out, *_ = aten._scaled_dot_product_attention_math(
            query, key, value, options["attn_mask"], options["dropout_p"], causal, scale=scale
        )
    return cast(Tensor, out)
