"""Reference implementation of every optimizer rule: slow, and written as the formula reads.

Each function takes the initial weights of one tensor, and a gradient and a learning rate per step. It
returns the final weights.
"""

from __future__ import annotations

from support.elementwise_references import adamw, adan, lion, mars, nadamw, qhadamw, sgd
from support.orthogonal_references import muon, normuon, scion_sign, scion_spectral
from support.rotation_references import basis_rotation, soap

RULES = {
    "adamw": adamw,
    "adan": adan,
    "basis-rotation": basis_rotation,
    "lion": lion,
    "mars": mars,
    "muon": muon,
    "nadamw": nadamw,
    "normuon": normuon,
    "qhadamw": qhadamw,
    "scion-sign": scion_sign,
    "scion-spectral": scion_spectral,
    "sgd": sgd,
    "soap": soap,
}
