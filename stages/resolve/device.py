"""Checks of how a configuration's stages are to be computed: compiled, as CUDA graphs. Imports no torch."""

from __future__ import annotations

from stages.config.limits import ConfigError
from stages.config.run_config import RunConfig
from stages.config.segments import has_tied_shards
from stages.model.compiler import compile_refusal


def check_device(config: RunConfig) -> None:
    """Check that the blocks can be compiled, and forwards and backwards be CUDA graphs, if a run asks for
    it."""
    refused = compile_refusal(config) if config.train.compile else None
    if refused is not None:
        raise ConfigError("train.compile", refused)
    refusals = {
        "site.device: cpu, which has none": config.site.device == "cpu",
        "model.factory, whose code may wait for the device": config.model.factory is not None,
        "experts, whose rows depend on the tokens": config.model.experts > 0,
        "data.document_mask, whose documents depend on the tokens": config.data.document_mask,
        "model.tied with parallel.shard_head, not tried with them": has_tied_shards(config),
    }
    for what, is_so in refusals.items():
        if config.train.cuda_graphs and is_so:
            raise ConfigError("train.cuda_graphs", f"does not go with {what}; accepted with it: false")
