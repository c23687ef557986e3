"""Low-precision training: the MXFP8 format, linear layers in it, conversion of models, and the Lightning plugin."""

from importlib import import_module
from typing import Any

from lightning_gem.precision.convert import ScopeRule, convert, high_precision, unconvert
from lightning_gem.precision.linear import (
    low_precision_batched_linear,
    low_precision_grouped_linear,
    low_precision_linear,
)
from lightning_gem.precision.mx import (
    MXBlocks,
    hadamard_matrix,
    mx_dequantize,
    mx_from_blocked,
    mx_quantize,
    mx_quantize_2d,
    mx_requantize,
    mx_to_blocked,
    random_hadamard,
)
from lightning_gem.precision.recipes import RECIPES, PrecisionRecipe, get_recipe

__all__ = [
    "RECIPES",
    "MXBlocks",
    "MXFP8Precision",
    "PrecisionRecipe",
    "ScopeRule",
    "convert",
    "get_recipe",
    "hadamard_matrix",
    "high_precision",
    "mx_dequantize",
    "mx_from_blocked",
    "mx_quantize",
    "mx_quantize_2d",
    "mx_requantize",
    "mx_to_blocked",
    "low_precision_batched_linear",
    "low_precision_grouped_linear",
    "low_precision_linear",
    "random_hadamard",
    "unconvert",
]


def __getattr__(name: str) -> Any:
    # Lightning is loaded with the plugin only.
    if name == "MXFP8Precision":
        return import_module("lightning_gem.precision.plugin").MXFP8Precision
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
