"""Optimizers by name and the corrections for stale gradients. Importing this imports no torch."""

from optimizers.catalogue import METHODS, NAMES, check_options, method_named
from optimizers.corrections.catalogue import CORRECTIONS, CorrectionMethod, check_correction, refusal
from optimizers.declaration import Method, Rule
from optimizers.grouping import ParameterGroup, Role, assign, role_of
from optimizers.named import is_custom
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
    "Rule",
    "assign",
    "check_correction",
    "check_options",
    "is_custom",
    "method_named",
    "refusal",
    "role_of",
]
