"""Optimizers by name and the corrections for stale gradients. Importing this imports no torch."""

from optimizers.catalogue import METHODS, NAMES, Method, check_options, method_named
from optimizers.correction_catalogue import CORRECTIONS, CorrectionMethod, check_correction, refusal
from optimizers.grouping import ParameterGroup, Role, assign, describe, role_of
from optimizers.options import Option

__all__ = [
    "CORRECTIONS",
    "METHODS",
    "NAMES",
    "CorrectionMethod",
    "Method",
    "Option",
    "ParameterGroup",
    "Role",
    "assign",
    "check_correction",
    "check_options",
    "describe",
    "method_named",
    "refusal",
    "role_of",
]
