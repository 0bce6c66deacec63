"""Optimizers by name and the corrections for stale gradients. Importing this imports no torch."""

from optimizers.catalogue import METHODS, NAMES, Method, Option, check_options, method_named
from optimizers.grouping import ParameterGroup, Role, assign, describe, role_of

__all__ = [
    "METHODS",
    "NAMES",
    "Method",
    "Option",
    "ParameterGroup",
    "Role",
    "assign",
    "check_options",
    "describe",
    "method_named",
    "role_of",
]
