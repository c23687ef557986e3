"""Recipes: what is quantised how in the three GEMMs of a linear layer."""

from dataclasses import dataclass
from typing import Literal

from lightning_gem.precision.mx import Format, ScaleMode

Kind = Literal["mx", "row", "block", "tensor", "auto"]


@dataclass(frozen=True)
class PrecisionRecipe:
    """How a linear layer computes.

    Attributes:
        name: For messages and checkpoints.
        fmt: Format of activations and weights.
        grad_fmt: Format of gradients.
        scale: How scales are rounded; ``rceil`` never saturates.
        compact: Save activations as MXFP8 for the backward pass, about half of bfloat16, and block weights in squares,
            so that forward and backward read the same copy. The other kinds always save FP8.
        high_precision_weight_gradient: Compute the gradient of the weight from unquantised gradients and activations
            (from the saved codes, if compact).
        kind: What shares a scale. ``mx``: 32 numbers along the contracted axis. ``row``: a token, an output of the
            weight. ``block``: 128 numbers of activations and gradients, 128 x 128 of weights. ``tensor``: everything,
            so that tokens influence each other; for comparisons. ``auto``: see :mod:`lightning_gem.precision.dispatch`.
        high_precision_input_gradient: Compute the gradient of the activations from unquantised gradients and weights;
            not for ``mx``.
    """

    name: str
    fmt: Format = "e4m3"
    grad_fmt: Format = "e4m3"
    scale: ScaleMode = "rceil"
    compact: bool = False
    high_precision_weight_gradient: bool = False
    kind: Kind = "mx"
    high_precision_input_gradient: bool = False


RECIPES = {
    "mxfp8": PrecisionRecipe("mxfp8"),
    "mxfp8_compact": PrecisionRecipe("mxfp8_compact", compact=True),
    "mxfp8_floor": PrecisionRecipe("mxfp8_floor", scale="floor"),
    "fp8_rowwise": PrecisionRecipe("fp8_rowwise", kind="row"),
    "fp8_blockwise": PrecisionRecipe("fp8_blockwise", kind="block"),
    "fp8_tensorwise": PrecisionRecipe("fp8_tensorwise", kind="tensor"),
    "fp8_forward": PrecisionRecipe(
        "fp8_forward", kind="row", high_precision_weight_gradient=True, high_precision_input_gradient=True
    ),
    "auto": PrecisionRecipe("auto", kind="auto"),
}


def get_recipe(recipe: "str | PrecisionRecipe") -> PrecisionRecipe:
    """The recipe of a name.

    Raises:
        ValueError: For any other name.
    """
    if isinstance(recipe, PrecisionRecipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"recipe {recipe!r} is unknown: use one of {', '.join(RECIPES)}")
    return RECIPES[recipe]
