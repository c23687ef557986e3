"""Recipes: what is quantised how in the three GEMMs of a linear layer."""

from dataclasses import dataclass

from lightning_gem.precision.mx import Format, ScaleMode


@dataclass(frozen=True)
class PrecisionRecipe:
    """How a linear layer computes.

    Attributes:
        name: For messages and checkpoints.
        fmt: Format of activations and weights.
        grad_fmt: Format of gradients.
        scale: How scales are rounded; ``rceil`` never saturates.
        compact: Save activations as MXFP8 for the backward pass, about half of bfloat16, and block weights in squares,
            so that forward and backward read the same copy.
        high_precision_weight_gradient: Compute the gradient of the weight from unquantised gradients and activations
            (from the saved codes, if compact).
    """

    name: str
    fmt: Format = "e4m3"
    grad_fmt: Format = "e4m3"
    scale: ScaleMode = "rceil"
    compact: bool = False
    high_precision_weight_gradient: bool = False


RECIPES = {
    "mxfp8": PrecisionRecipe("mxfp8"),
    "mxfp8_compact": PrecisionRecipe("mxfp8_compact", compact=True),
}
PLANNED = ("fp8_rowwise", "fp8_blockwise", "auto")


def get_recipe(recipe: "str | PrecisionRecipe") -> PrecisionRecipe:
    """The recipe of a name.

    Raises:
        NotImplementedError: For a name that is reserved.
        ValueError: For any other name.
    """
    if isinstance(recipe, PrecisionRecipe):
        return recipe
    names = ", ".join(RECIPES)
    if recipe in PLANNED:
        raise NotImplementedError(
            f"recipe {recipe!r} does not exist yet: use one of {names}, or leave the model in bf16"
        )
    if recipe not in RECIPES:
        raise ValueError(f"recipe {recipe!r} is unknown: use one of {names}")
    return RECIPES[recipe]
