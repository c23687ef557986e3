"""Conversion in place: scope, errors, copies, pickles, compilers, checkpointing, and the GEM network itself."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_gem.models import GEM, GEMConfig
from lightning_gem.precision import RECIPES, ScopeRule, convert, high_precision, low_precision_linear, unconvert
from lightning_gem.precision.convert import ConvertedLinear, converted_class
from tests.helpers import make_batch, make_schema

SOME = ("mxfp8_compact", "fp8_rowwise")


class Block(nn.Module):
    """A gated residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Has a projection only."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x)


class Net(nn.Module):
    """Embedding, norm, layers, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 32), nn.LayerNorm(32)
        self.layers = nn.ModuleList([Block(), Attention(), Block()])
        self.head, self.out = nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(ids))
        for layer in self.layers:
            x = layer(x)
        return self.out(self.head(x))


DEFAULT = ["layers.0.up", "layers.0.down", "layers.1.project", "layers.2.up", "layers.2.down"]
IDS = torch.arange(40) % 10


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


SCOPES = [
    ({}, DEFAULT),
    ({"exclude": (r"\.down$",)}, ["layers.0.up", "layers.1.project", "layers.2.up"]),
    ({"include": ("gate", r"layers\.1")}, ["layers.0.gate", "layers.1.project", "layers.2.gate"]),
    ({"include": ("gate",), "exclude": (r"layers\.2",)}, ["layers.0.gate"]),
    ({"include_types": ("Attention",)}, ["layers.1.project"]),
    ({"exclude_types": ("Block",)}, ["layers.1.project"]),
    ({"keep_last_layers": 2}, ["layers.0.up", "layers.0.down"]),
    ({"include": ("out",), "pad": True}, ["out"]),
]


@pytest.mark.parametrize(("rule", "names"), SCOPES)
def test_scope(rule: dict[str, Any], names: list[str]) -> None:
    net = make_net()
    assert convert(net, "mxfp8", ScopeRule(**rule)) == names
    assert [name for name, module in net.named_modules() if isinstance(module, ConvertedLinear)] == names
    assert net(IDS).isfinite().all()


ERRORS = [
    ({"include": ("atention",)}, "include pattern 'atention' matches no linear layer.*layers.0.up"),
    ({"exclude": ("norm",)}, "exclude pattern 'norm' matches no linear layer"),
    ({"include_types": ("Atention",)}, "include_types 'Atention'.*'Attention'"),
    ({"exclude_types": ("LayerNorm",)}, "exclude_types 'LayerNorm'"),
    ({"exclude": (".",)}, "leaves none of the 9 linear layers of Net"),
    ({"keep_last_layers": 4}, "must be 0 to 3, the size of layers"),
    ({"keep_last_layers": 1, "layers": "blocks"}, "no module list called 'blocks'"),
    ({"include": ("out",)}, r"out multiplies by a matrix of 1 x 32.*add 'out' to exclude, or set pad"),
]


@pytest.mark.parametrize(("rule", "message"), ERRORS)
def test_errors_leave_the_model_alone(rule: dict[str, Any], message: str) -> None:
    net = make_net()
    with pytest.raises(ValueError, match=message):
        convert(net, "mxfp8", ScopeRule(**rule))
    assert not any(isinstance(module, ConvertedLinear) for module in net.modules())


def test_nothing_to_convert() -> None:
    with pytest.raises(ValueError, match="has no linear layer"):
        convert(nn.Embedding(4, 4))
    with pytest.raises(ValueError, match="has no linear layer"):  # never calls its projection
        convert(nn.MultiheadAttention(32, 2))
    with pytest.raises(ValueError, match="'fp4' is unknown"):
        convert(make_net(), "fp4")


@pytest.mark.parametrize("recipe", RECIPES)
def test_state_dict_and_parameters_are_the_same(recipe: str) -> None:
    net = make_net()
    before, parameters = copy.deepcopy(net.state_dict()), list(net.parameters())
    convert(net, recipe)
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    after = net.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    make_net().load_state_dict(after)
    buffer = io.BytesIO()
    torch.save(after, buffer)
    buffer.seek(0)
    net.load_state_dict(torch.load(buffer, weights_only=True))


def test_converting_again_and_back() -> None:
    net = make_net()
    exact, classes = net(IDS), [type(module) for module in net.modules()]
    assert convert(net) == convert(net) == DEFAULT
    once = net(IDS)
    assert not torch.equal(once, exact)
    assert type(net.layers[0].up) is converted_class(nn.Linear)
    assert "recipe=mxfp8" in repr(net)
    convert(net, "mxfp8_compact", ScopeRule(keep_last_layers=1))
    assert net.layers[0].up.precision_recipe.name == "mxfp8_compact"
    assert type(net.layers[2].up) is nn.Linear
    unconvert(net)
    assert [type(module) for module in net.modules()] == classes
    assert torch.equal(net(IDS), exact)
    assert "recipe" not in repr(net)
    assert not {"precision_recipe", "precision_enabled"} & set(vars(net.layers[0].up))


def test_high_precision() -> None:
    net = make_net()
    exact = net(IDS)
    convert(net)
    low = net(IDS)
    with high_precision(net):
        assert torch.equal(net(IDS), exact)
    assert torch.equal(net(IDS), low)


def test_copies_and_pickles() -> None:
    net = make_net()
    convert(net)
    low = net(IDS)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(IDS), low)
        assert type(other.layers[0].up) is type(net.layers[0].up)
        assert other.layers[0].up.weight is not net.layers[0].up.weight
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(IDS), low)


@pytest.mark.parametrize("recipe", SOME)
def test_compiled(recipe: str) -> None:
    net = make_net()
    net.layers = net.layers[:1]  # compilation takes seconds per layer
    convert(net, recipe)
    low = net(IDS)
    low.sum().backward()
    grads = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    compiled = torch.compile(net, fullgraph=True)
    out = compiled(IDS)
    out.sum().backward()
    # A sum in another order may move a number over the border between two codes.
    torch.testing.assert_close(out, low, rtol=1e-2, atol=1e-2)
    for parameter, grad in zip(net.parameters(), grads, strict=True):
        assert (parameter.grad - grad).norm() <= 0.02 * grad.norm()


@pytest.mark.parametrize("recipe", SOME)
def test_activation_checkpointing(recipe: str) -> None:
    net = make_net()
    convert(net, recipe)
    net(IDS).sum().backward()
    grads = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    for layer in net.layers:
        layer.forward = lambda x, forward=layer.forward: checkpoint(forward, x, use_reentrant=False)
    net(IDS).sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(net.parameters(), grads, strict=True))


def test_equals_the_function() -> None:
    net = make_net()
    layer = net.layers[0].up
    convert(net)
    x = torch.randn(5, 7, 32)
    assert torch.equal(layer(x), low_precision_linear(x, layer.weight, layer.bias))
    assert layer(torch.zeros(0, 32)).shape == (0, 64)


KEPT = ("dense_in", "event_tokenizers.0.hidden", "event_tokenizers.0.gate", "heads.shared", "heads.tasks", "wide")


@pytest.mark.parametrize("recipe", SOME)
def test_gem(recipe: str) -> None:
    """Default scope on the network: projections, feed-forward and experts in; raw features, gates, heads out."""
    torch.manual_seed(0)
    schema = make_schema(dims=(32, 32))
    net = GEM(schema, GEMConfig(width=32, event_gate=True, wide=True))
    batch = make_batch(schema, {"views": [3, 0, 5, 40], "clicks": [0, 0, 1, 7]})
    exact = net(batch)
    keys = list(net.state_dict())
    names = convert(net, recipe)
    assert list(net.state_dict()) == keys
    assert not [name for name in names if any(kept in name for kept in KEPT)]
    for part in ("experts", "query_key_value", "attention.out", "key_value", "compress.project", "dense_out"):
        assert [name for name in names if name.endswith(part)], part
    low = net(batch)
    assert not torch.equal(low, exact)
    assert (low - exact).abs().max() < 0.2
    low.sum().backward()
    silent = [name for name, p in net.named_parameters() if p.grad is None and "embeddings" not in name]
    assert not silent
    with high_precision(net):
        assert torch.equal(net(batch), exact)


def test_gem_of_odd_width_names_the_module() -> None:
    net = GEM(make_schema(), GEMConfig(width=16))
    with pytest.raises(ValueError, match=r"feed_forward.key_value multiplies by .* multiples of 32"):
        convert(net)
    convert(net, scope=ScopeRule(pad=True))


def test_gem_without_neighbours() -> None:
    """A request's logits in MXFP8 do not depend on the rest of the batch."""
    torch.manual_seed(0)
    schema = make_schema()
    net = GEM(schema, GEMConfig(width=32)).eval()
    convert(net)
    lengths = {"views": [3, 4, 5, 40], "clicks": [2, 1, 1, 7]}
    batch, other = make_batch(schema, lengths), make_batch(schema, lengths)
    other.dense[1:] *= 1e3
    first, second = net(batch), net(other)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
