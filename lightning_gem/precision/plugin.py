"""The Lightning plugin: bf16 autocast, and MXFP8 in the layers of the scope."""

from dataclasses import asdict, replace
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_gem.precision.convert import ScopeRule, convert
from lightning_gem.precision.matmul import native_mx
from lightning_gem.precision.recipes import get_recipe

_announced: set[str] = set()


class MXFP8Precision(MixedPrecision):
    """``bf16-mixed``, with the matrix products of the scope in MXFP8. Parameters stay as they are.

    On GPUs of compute capability 10 (Blackwell) the products run on block-scaled tensor cores. Everywhere else their
    numerics are emulated exactly, which is slower than bf16: for studying quality, not for speed. In use::

        Trainer(plugins=[MXFP8Precision(exclude=["layers.0."])])

    Attributes:
        converted: Names of the converted modules.

    Args:
        recipe: ``mxfp8`` or ``mxfp8_compact``.
        include: Regular expressions of module names; None: the defaults of :class:`ScopeRule`, as for the rest.
        exclude: Regular expressions of module names that stay in bf16.
        include_types: Names of classes to convert, or to convert inside of.
        exclude_types: Names of classes that stay in bf16.
        keep_last_layers: Last layers that stay in bf16.
        layers: Name of the module list that holds the layers.
        pad: Pad widths that are no multiple of 32.
        high_precision_weight_gradient: Compute gradients of weights in bf16.
        require_native: Refuse to train on a device that would emulate.
    """

    def __init__(
        self,
        recipe: str = "mxfp8",
        include: list[str] | None = None,
        exclude: list[str] | None = None,
        include_types: list[str] | None = None,
        exclude_types: list[str] | None = None,
        keep_last_layers: int = 0,
        layers: str = "layers",
        pad: bool = False,
        high_precision_weight_gradient: bool = False,
        require_native: bool = False,
    ) -> None:
        super().__init__("bf16-mixed", "cuda" if torch.cuda.is_available() else "cpu")
        self.recipe = replace(get_recipe(recipe), high_precision_weight_gradient=high_precision_weight_gradient)
        self.scope = ScopeRule(
            None if include is None else tuple(include),
            tuple(exclude or ()),
            None if include_types is None else tuple(include_types),
            tuple(exclude_types or ()),
            keep_last_layers,
            layers,
            pad,
        )
        self.require_native = require_native
        self.converted: list[str] = []
        self._module: nn.Module | None = None

    def settings(self) -> dict[str, Any]:
        """Arguments that make this plugin again, in types that YAML has."""
        scope = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self.scope).items()}
        return {
            "recipe": self.recipe.name,
            **scope,
            "high_precision_weight_gradient": self.recipe.high_precision_weight_gradient,
            "require_native": self.require_native,
        }

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts in place: some strategies ignore what this returns."""
        self.converted = convert(module, self.recipe, self.scope)
        self._module = module
        rank_zero_info(f"{self.recipe.name} in {len(self.converted)} modules")
        return module

    def autocast_context_manager(self) -> torch.autocast:
        """Autocast on the device that the model is on by now."""
        if self._module is not None:
            device = next(self._module.parameters()).device
            self._module = None
            self.device = device.type
            if self.require_native and not native_mx(device):
                raise ValueError(
                    f"{self.recipe.name} with require_native needs a GPU of compute capability 10 (Blackwell), and "
                    f"{self.converted[0]} is on {device}: set require_native to false to emulate, or use bf16-mixed"
                )
            announce_emulation(device)
        return super().autocast_context_manager()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run is compared with."""
        return {**super().state_dict(), "recipe": self.recipe.name, "converted": self.converted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Warns where the run that is resumed computed otherwise."""
        state = dict(state_dict)
        recipe, converted = state.pop("recipe", None), state.pop("converted", [])
        super().load_state_dict(state)
        if recipe != self.recipe.name:
            rank_zero_warn(
                f"the checkpoint was trained with recipe {recipe!r}, this run goes on with {self.recipe.name!r}"
            )
        different = sorted(set(converted) ^ set(self.converted))
        if different:
            rank_zero_warn(
                f"the checkpoint was trained with other modules in low precision; {len(different)} differ, "
                f"the first are {', '.join(different[:5])}"
            )

    def teardown(self) -> None:
        """Lets go of the model."""
        self._module = None


def announce_emulation(device: torch.device) -> None:
    """Says once per process and kind of device that MXFP8 saves no time on it."""
    if native_mx(device) or device.type in _announced:
        return
    _announced.add(device.type)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    rank_zero_warn(
        f"MXFP8 on this device ({name}) is numerics only: products are emulated exactly and cost more time than bf16. "
        "A GPU of compute capability 10 (Blackwell) runs them natively"
    )
