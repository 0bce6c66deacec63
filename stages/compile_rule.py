"""Which runs compile their blocks. Imports no torch."""

from __future__ import annotations

import schedules
from stages.config import RunConfig
from stages.model.compiler import missing_for_compile
from stages.pipeline.segments import segment_program, sync_steps


def compile_refusal(config: RunConfig) -> str | None:
    """Why the blocks of a run cannot be compiled, on any machine; None: they can."""
    if config.model.factory is not None:
        return "goes with the decoder, not with model.factory; accepted with it: false"
    program = segment_program(config, first_step=sync_steps(config), steps=3)
    if config.train.recompute != "full" and max(schedules.analyze(program).mismatch_max) > 0:
        return (
            f"under {config.schedule.name} weights change between forward and backward, and which "
            "activations a compiled block keeps, and which it computes anew from the newer weights, is the "
            "compiler's choice; accepted with it: train.recompute: full (all are computed anew)"
        )
    return None


def is_compiled(config: RunConfig, *, device: str) -> bool:
    """Whether a run wants its blocks compiled: `train.compile`; null: on a GPU, if they can be.

    Args:
        config: a valid configuration.
        device: `cpu` or `cuda`.
    """
    if config.train.compile is not None:
        return config.train.compile
    return device == "cuda" and compile_refusal(config) is None


def compiles_here(config: RunConfig, *, device: str) -> bool:
    """Whether this machine compiles a run's blocks. If `train.compile` is null, it need not have the tools.

    Raises:
        RuntimeError: `train.compile` is true, and the tools are missing.
    """
    if not is_compiled(config, device=device):
        return False
    missing = missing_for_compile(device=device)
    if missing is not None and config.train.compile:
        raise RuntimeError(f"train.compile is true, but {missing}; install it, or set train.compile: false")
    return missing is None
