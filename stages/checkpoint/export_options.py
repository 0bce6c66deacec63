"""What may be exported. Imports no torch."""

from __future__ import annotations

from enum import StrEnum


class ExportFormat(StrEnum):
    """Format of an export."""

    HF = "hf"
    """Names of the family's class in `transformers`, and its config.json."""
    SAFETENSORS = "safetensors"
    """Our own names, weights alone."""


class Weights(StrEnum):
    """Kinds of a run's weights."""

    MASTER = "master"
    """Evaluation weights: the master copy in full precision, with the correction applied."""
    WORKING = "working"
    """The newest weights that the pipeline computes with, in their own precision."""
    EMA = "ema"
    """The average of the evaluation weights (`train.ema_decay`), in full precision."""
