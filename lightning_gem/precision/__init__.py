"""Low-precision training: the MXFP8 format, linear layers in it, conversion of models, and the Lightning plugin."""

from importlib import import_module
from typing import Any

from lightning_gem.precision.activations import compressed_activations
from lightning_gem.precision.attention import mx_fake_quantize, with_low_precision_scores
from lightning_gem.precision.convert import ScopeRule, convert, convert_attention, high_precision, unconvert
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
from lightning_gem.precision.norm_linear import low_precision_norm_linear
from lightning_gem.precision.recipes import RECIPES, PrecisionRecipe, get_recipe

__all__ = [
    "RECIPES",
    "MXBlocks",
    "MXFP8Precision",
    "PrecisionRecipe",
    "ScopeRule",
    "compressed_activations",
    "convert",
    "convert_attention",
    "get_recipe",
    "hadamard_matrix",
    "high_precision",
    "low_precision_batched_linear",
    "low_precision_grouped_linear",
    "low_precision_linear",
    "low_precision_norm_linear",
    "mx_dequantize",
    "mx_fake_quantize",
    "mx_from_blocked",
    "mx_quantize",
    "mx_quantize_2d",
    "mx_requantize",
    "mx_to_blocked",
    "random_hadamard",
    "unconvert",
    "with_low_precision_scores",
]


def __getattr__(name: str) -> Any:
    # Lightning is loaded with the plugin only.
    if name == "MXFP8Precision":
        return import_module("lightning_gem.precision.plugin").MXFP8Precision
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
