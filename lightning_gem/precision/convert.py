"""Conversion of a model: chosen modules change their class in place, and nothing else.

Parameters, their names, optimizer references and checkpoints stay what they were, so conversion works before and after
DDP, FSDP2 and optimizers have seen the model. What is converted:

- ``torch.nn.Linear``, and subclasses that keep its ``forward``;
- modules that multiply one matrix per expert through a method ``batched_product(x, weight)`` of ``(E, M, K)`` and ``(E,
  K, N)``, and list those matrices in ``batched_weights()``;
- on demand, attention whose queries and keys pass through a method ``score_operands(query, key)``.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_gem.precision.attention import mx_fake_quantize
from lightning_gem.precision.linear import low_precision_batched_linear, low_precision_linear
from lightning_gem.precision.mx import BLOCK
from lightning_gem.precision.recipes import PrecisionRecipe, get_recipe

# Names that stay in high precision unless a scope includes them: gates and routers, heads and logits, wide parts, and
# the layers that read raw features: in this package, and the bottom MLP of TorchRec's DLRM.
DEFAULT_EXCLUDE = (
    r"(^|\.)(\w+_)?(gate|gates|gating|router|routers)(\.|$)",
    r"(^|\.)(\w+_)?(head|heads|logit|logits)(\.|$)",
    r"(^|\.)wide(\.|$)",
    r"(^|\.)feature_tokenizer\.dense_in$",
    r"(^|\.)event_tokenizers\.\d+\.hidden$",
    r"(^|\.)dense_arch\.model\._mlp\.0\.",
)
# Layers with fewer outputs are logits or gates by another name.
LEAST_OUTPUTS = 32
_generated: dict[type[nn.Module], type[nn.Module]] = {}


@dataclass(frozen=True)
class ScopeRule:
    """Which modules are converted; embeddings, norms and everything that is no matrix product never are.

    Attributes:
        include: Regular expressions, searched in the module's name; None: every module but those of ``DEFAULT_EXCLUDE``
            and those with fewer than 32 outputs. What a pattern includes is not subject to these defaults.
        exclude: Regular expressions of names that stay, whatever ``include`` says.
        include_types: Names of classes; only modules of such a class, or inside of one, are converted. None: all.
        exclude_types: Names of classes; modules of such a class, or inside of one, stay.
        keep_last_layers: This many of the last layers stay.
        layers: Name of the module list that holds the layers.
        pad: Pad widths that are no multiple of 32 in every product; otherwise such a module is an error.
    """

    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    include_types: tuple[str, ...] | None = None
    exclude_types: tuple[str, ...] = ()
    keep_last_layers: int = 0
    layers: str = "layers"
    pad: bool = False


class Converted:
    """What converted modules have in common; comes before the original class among their bases.

    Attributes:
        precision_recipe: How they compute.
        precision_enabled: False: as before the conversion, for comparisons.
        precision_probe: Called with the input, the weight ``(..., N, K)`` and the output of each product, if set.
    """

    precision_recipe: PrecisionRecipe
    precision_enabled: bool
    precision_probe: Callable[[Tensor, Tensor, Tensor], None] | None = None
    original_class: type[nn.Module]

    def extra_repr(self) -> str:
        """Adds the recipe to the module's text."""
        text = super().extra_repr()  # type: ignore[misc]
        return f"{text}{', ' if text else ''}recipe={self.precision_recipe.name}"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Generated classes cannot be imported by name: copies and pickles make them again.
        return _rebuild, (self.original_class,), self.__dict__


class ConvertedLinear(Converted):
    """``torch.nn.Linear`` that multiplies in low precision."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """As ``torch.nn.Linear``."""
        if not self.precision_enabled:
            return super().forward(input)  # type: ignore[misc]
        out = low_precision_linear(input, self.weight, self.bias, self.precision_recipe)
        if self.precision_probe is not None:
            self.precision_probe(input, self.weight, out)
        return out


class ConvertedExperts(Converted):
    """A module whose products with one matrix per expert are in low precision."""

    def batched_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """``(E, M, K)`` times ``(E, K, N)``."""
        if not self.precision_enabled:
            return super().batched_product(x, weight)  # type: ignore[misc]
        out = low_precision_batched_linear(x, weight.transpose(1, 2), self.precision_recipe)
        if self.precision_probe is not None:
            self.precision_probe(x, weight.transpose(1, 2), out)
        return out


class ConvertedAttention(Converted):
    """Attention whose scores are of queries and keys in MXFP8."""

    # A rotation comes before the quantisation, so not in the kernel.
    rotates_in_kernel = False

    def score_operands(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Both in blocks of 32 along the head's dimension."""
        if not self.precision_enabled:
            return query, key
        return mx_fake_quantize(query), mx_fake_quantize(key)


def converted_class(original: type[nn.Module]) -> type[nn.Module]:
    """The converted class of a class: one per class, so that copies of a module have the same."""
    if original not in _generated:
        mixin: type[Converted] = ConvertedLinear if issubclass(original, nn.Linear) else ConvertedExperts
        if hasattr(original, "score_operands"):
            mixin = ConvertedAttention
        attributes = {"original_class": original, "__module__": __name__, "__doc__": mixin.__doc__}
        _generated[original] = type(f"MX{original.__name__}", (mixin, original), attributes)
    return _generated[original]


def _rebuild(original: type[nn.Module]) -> nn.Module:
    cls = converted_class(original)
    return cls.__new__(cls)


def convert(model: nn.Module, recipe: str | PrecisionRecipe = "mxfp8", scope: ScopeRule | None = None) -> list[str]:
    """Converts the modules in scope, in place; a converted model gets the new recipe and scope.

    Args:
        model: Any module.
        recipe: A recipe or its name.
        scope: What is converted.

    Returns:
        The names of the converted modules.

    Raises:
        ValueError: For a pattern, class or list of layers that matches nothing, an empty scope, and widths that are no
            multiple of 32; the message names the module and what to do. The model is unchanged then.
    """
    chosen, rule = get_recipe(recipe), scope or ScopeRule()
    names = select(model, rule)
    if not rule.pad:
        for name in names:
            _check_widths(name, model.get_submodule(name))
    unconvert(model)
    for name in names:
        module = model.get_submodule(name)
        module.__class__ = converted_class(type(module))
        module.precision_recipe = chosen  # type: ignore[assignment]
        module.precision_enabled = True  # type: ignore[assignment]
    return names


def convert_attention(
    model: nn.Module, recipe: str | PrecisionRecipe = "mxfp8", scope: ScopeRule | None = None
) -> list[str]:
    """Quantises queries and keys of attention, in place; its other products and its softmax stay.

    Args:
        model: Any module, after :func:`convert`.
        recipe: A recipe or its name, for messages.
        scope: ``exclude`` and ``exclude_types`` leave modules out, and so do the last layers.

    Returns:
        The names of the converted modules.

    Raises:
        ValueError: If there is none.
    """
    rule, chosen = scope or ScopeRule(), get_recipe(recipe)
    kept = _last_layers(model, rule)
    names = [
        name
        for name, module in model.named_modules()
        if hasattr(type(module), "score_operands")
        and not isinstance(module, Converted)
        and not _matches(name, rule.exclude)
        and not _classes_around(model, name) & set(rule.exclude_types)
        and not name.startswith(kept)
    ]
    if not names:
        raise ValueError(f"{type(model).__name__} has no attention in scope: leave attention in bf16")
    for name in names:
        module = model.get_submodule(name)
        module.__class__ = converted_class(type(module))
        module.precision_recipe, module.precision_enabled = chosen, True  # type: ignore[assignment]
    return names


def matrices(model: nn.Module) -> list[tuple[int, int]]:
    """Outputs and inputs of the converted matrices."""
    found: list[tuple[int, int]] = []
    for module in model.modules():
        if isinstance(module, ConvertedLinear):
            found.append((module.weight.shape[0], module.weight.shape[1]))
        elif isinstance(module, ConvertedExperts):
            weights: list[Tensor] = module.batched_weights()  # type: ignore[operator]
            found += [(weight.shape[-1], weight.shape[-2]) for weight in weights]
    return found


def unconvert(model: nn.Module) -> None:
    """Gives every converted module its class back."""
    for module in model.modules():
        if isinstance(module, Converted):
            original = module.original_class
            del module.precision_recipe, module.precision_enabled
            module.__class__ = original  # type: ignore[assignment]


@contextmanager
def high_precision(model: nn.Module) -> Iterator[None]:
    """Inside, converted modules compute as they did before the conversion: same weights, no reload."""
    modules = [module for module in model.modules() if isinstance(module, Converted)]
    before = [module.precision_enabled for module in modules]
    for module in modules:
        module.precision_enabled = False
    try:
        yield
    finally:
        for module, enabled in zip(modules, before, strict=True):
            module.precision_enabled = enabled


def select(model: nn.Module, scope: ScopeRule) -> list[str]:
    """Names of the modules in scope.

    Raises:
        ValueError: As :func:`convert`, except for widths.
    """
    candidates = {name: module for name, module in model.named_modules() if is_convertible(module)}
    if not candidates:
        raise ValueError(f"{type(model).__name__} has no linear layer to convert: leave out the precision recipe")
    classes = {name: _classes_around(model, name) for name in candidates}
    _check_patterns("include", scope.include or (), candidates)
    _check_patterns("exclude", scope.exclude, candidates)
    for argument, types in (("include_types", scope.include_types or ()), ("exclude_types", scope.exclude_types)):
        known = sorted(set().union(*classes.values()))
        for name in types:
            if name not in known:
                raise ValueError(f"{argument} {name!r} is no class around a linear layer: use one of {known}")
    kept = _last_layers(model, scope)
    names = [
        name
        for name, module in candidates.items()
        if (_matches(name, scope.include) if scope.include is not None else _is_default(name, module))
        and not _matches(name, scope.exclude)
        and (scope.include_types is None or classes[name] & set(scope.include_types))
        and not classes[name] & set(scope.exclude_types)
        and not name.startswith(kept)
    ]
    if not names:
        raise ValueError(
            f"the scope leaves none of the {len(candidates)} linear layers of {type(model).__name__}: widen include, "
            f"or exclude less; they are {', '.join(list(candidates)[:8])}"
        )
    return names


def is_convertible(module: nn.Module) -> bool:
    """Whether a module is of a kind that can be converted."""
    cls = module.original_class if isinstance(module, Converted) else type(module)
    if issubclass(cls, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False  # torch's multi-head attention reads its weight and never calls it
    return cls.forward is nn.Linear.forward or (hasattr(cls, "batched_product") and hasattr(cls, "batched_weights"))


def _is_default(name: str, module: nn.Module) -> bool:
    few = isinstance(module, nn.Linear) and module.out_features < LEAST_OUTPUTS
    return not few and not _matches(name, DEFAULT_EXCLUDE)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _check_patterns(argument: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    names = list(names)
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"{argument} pattern {pattern!r} matches no linear layer: correct it, or leave it out; layers are "
                f"called {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
            )


def _classes_around(model: nn.Module, name: str) -> set[str]:
    parts = name.split(".") if name else []
    modules = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1)]
    classes = [module.original_class if isinstance(module, Converted) else type(module) for module in modules]
    return {cls.__name__ for cls in classes}


def _last_layers(model: nn.Module, scope: ScopeRule) -> tuple[str, ...]:
    """Prefixes of the names inside the last layers."""
    if scope.keep_last_layers == 0:
        return ()
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == scope.layers and isinstance(module, nn.ModuleList | nn.Sequential)
    ]
    if not lists:
        raise ValueError(
            f"keep_last_layers={scope.keep_last_layers} finds no module list called {scope.layers!r}: set layers to "
            "the name of the list that holds the layers, or use exclude"
        )
    prefixes = []
    for name, module in lists:
        if not 0 < scope.keep_last_layers <= len(module):
            raise ValueError(
                f"keep_last_layers={scope.keep_last_layers} must be 0 to {len(module)}, the size of {name}"
            )
        prefixes += [f"{name}.{i}." for i in range(len(module) - scope.keep_last_layers, len(module))]
    return tuple(prefixes)


def _check_widths(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        shapes = [module.weight.shape]
    else:
        shapes = [weight.shape[1:] for weight in module.batched_weights()]  # type: ignore[operator]
    for shape in shapes:
        if any(size % BLOCK for size in shape):
            raise ValueError(
                f"{name} multiplies by a matrix of {shape[0]} x {shape[1]}, which blocks of {BLOCK} do not fill: make "
                f"its widths multiples of {BLOCK}, add {re.escape(name)!r} to exclude, or set pad to pad with zeros"
            )
