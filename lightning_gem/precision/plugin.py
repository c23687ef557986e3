"""The Lightning plugin: bf16 autocast, and a recipe of low precision in the layers of the scope."""

from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_gem.precision import dispatch
from lightning_gem.precision.convert import ScopeRule, convert, convert_attention, matrices
from lightning_gem.precision.fsdp import quantize_all_gather
from lightning_gem.precision.matmul import native_mx, native_rows
from lightning_gem.precision.recipes import Kind, get_recipe

_announced: set[str] = set()


class MXFP8Precision(MixedPrecision):
    """``bf16-mixed``, with the matrix products of the scope in MXFP8 or FP8. Parameters stay as they are.

    MXFP8 runs on block-scaled tensor cores of GPUs of compute capability 10 (Blackwell), FP8 with a scale per row on
    those of 9.0 (Hopper). Everywhere else their numerics are emulated exactly, which is slower than bf16: for studying
    quality, not for speed. ``auto`` uses FP8 where measurements show it to be faster, and bf16 elsewhere. In use::

        Trainer(plugins=[MXFP8Precision(exclude=["layers.0."])])

    Attributes:
        converted: Names of the converted modules.

    Args:
        recipe: ``mxfp8``, ``mxfp8_compact``, ``fp8_rowwise``, ``fp8_forward``, ``auto``, or another of ``RECIPES``.
        include: Regular expressions of module names; None: the defaults of :class:`ScopeRule`, as for the rest.
        exclude: Regular expressions of module names that stay in bf16.
        include_types: Names of classes to convert, or to convert inside of.
        exclude_types: Names of classes that stay in bf16.
        keep_last_layers: Last layers that stay in bf16.
        layers: Name of the module list that holds the layers.
        pad: Pad widths that are no multiple of 32.
        high_precision_weight_gradient: Compute gradients of weights in bf16.
        require_native: Refuse to train on a device that would emulate.
        attention: ``mxfp8``: the scores of attention are of queries and keys in MXFP8 (on every device their numbers
            alone: nothing is faster).
        low_precision_all_gather: FSDP2 gathers the weights of recipe ``mxfp8_compact`` as MXFP8.
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
        attention: Literal["bf16", "mxfp8"] = "bf16",
        low_precision_all_gather: bool = False,
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
        if attention not in ("bf16", "mxfp8"):
            raise ValueError(f"attention {attention!r} must be 'bf16' or 'mxfp8'")
        self.require_native = require_native
        self.attention = attention
        self.low_precision_all_gather = low_precision_all_gather
        self.table: dispatch.Table | None = None
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
            "attention": self.attention,
            "low_precision_all_gather": self.low_precision_all_gather,
        }

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts in place: some strategies ignore what this returns."""
        self.converted = convert(module, self.recipe, self.scope)
        if self.attention == "mxfp8":
            self.converted += convert_attention(module, self.recipe, self.scope)
        self._module = module
        rank_zero_info(f"{self.recipe.name} in {len(self.converted)} modules")
        return module

    def autocast_context_manager(self) -> torch.autocast:
        """Autocast on the device that the model is on by now."""
        if self._module is not None:
            module, self._module = self._module, None
            self._begin(module, next(module.parameters()).device)
        return super().autocast_context_manager()

    def _begin(self, module: nn.Module, device: torch.device) -> None:
        """What depends on the device, before the first step."""
        self.device = device.type
        kind = self.recipe.kind
        if self.require_native and not is_native(device, kind):
            needs = "10 (Blackwell)" if kind == "mx" else "9.0 (Hopper)"
            raise ValueError(
                f"{self.recipe.name} with require_native needs a GPU of compute capability {needs}, and "
                f"{self.converted[0]} is on {device}: set require_native to false to emulate, or use bf16-mixed"
            )
        if kind == "auto":
            if self.table is None:
                self.table = dispatch.measure(matrices(module), device)
            dispatch.use(self.table)
        else:
            announce_emulation(device, kind)
        if self.low_precision_all_gather:
            names = quantize_all_gather(module)
            rank_zero_info(f"{len(names)} weights are gathered as MXFP8")

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run is compared with."""
        state = {**super().state_dict(), "recipe": self.recipe.name, "converted": self.converted}
        return state if self.table is None else {**state, "table": self.table}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Warns where the run that is resumed computed otherwise."""
        state = dict(state_dict)
        recipe, converted = state.pop("recipe", None), state.pop("converted", [])
        # A resumed run computes every layer as it did before, whatever this GPU would measure.
        table = state.pop("table", None)
        if self.recipe.kind == "auto":
            self.table = table
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


def is_native(device: torch.device, kind: Kind) -> bool:
    """Whether a device multiplies what a kind of recipe quantises."""
    if kind == "mx":
        return native_mx(device)
    return kind in ("row", "auto") and native_rows(device)


def announce_emulation(device: torch.device, kind: Kind) -> None:
    """Says once per process, kind of device and of recipe that low precision saves no time on it."""
    if is_native(device, kind) or f"{device.type} {kind}" in _announced:
        return
    _announced.add(f"{device.type} {kind}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    what, where = {
        "mx": ("MXFP8", "A GPU of compute capability 10 (Blackwell) runs them natively"),
        "row": ("FP8 with a scale per row", "A GPU of compute capability 9.0 (Hopper) runs them natively"),
    }.get(kind, (f"FP8 with a scale per {kind}", "No device runs them natively"))
    rank_zero_warn(
        f"{what} on this device ({name}) is numerics only: products are emulated exactly and cost more time than bf16. "
        f"{where}"
    )
