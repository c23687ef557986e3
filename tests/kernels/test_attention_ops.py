"""The attention ops as torch sees them: schemas, fake kernels, compilation, checkpointing, FLOPs."""

import pytest
import torch
from kernel_cases import offsets, qkv, tokens

from lightning_gem.kernels.dot_product import registration as gdpa_ops
from lightning_gem.kernels.flash import registration as flash_ops

OPS = torch.ops.lightning_gem


def flash_arguments(requires_grad=True, bias=False, broadcast=False):
    query, key, value = (x.requires_grad_(requires_grad) for x in qkv(14, 12, heads=4, dim=8, dtype=torch.float32))
    attn_bias = tokens(3, 1, 9, 9, dtype=torch.float32).requires_grad_(requires_grad) if bias else None
    cu_q = None if broadcast else offsets([5, 0, 7])
    return (
        *(query, key, value, cu_q, offsets([9, 1, 2]), None, 9, attn_bias, None, 0, True, "auto"),
        *(0.3, 0.0, False, 3, -1, broadcast),
    )


def gdpa_arguments(requires_grad=True, targets=False, broadcast=False):
    query, key, value = (x.requires_grad_(requires_grad) for x in qkv(12, 12, heads=4, dim=8, dtype=torch.float32))
    cu = offsets([5, 0, 7])
    return (
        *(query, key, value, None if broadcast else cu, cu, 7, None, offsets([1, 2]) if targets else None, None, 0),
        *(True, "auto", "silu", 0.3, 0.5, True, -1, -1, 2 if targets else 0, broadcast),
    )


@pytest.mark.parametrize("kwargs", [{}, {"bias": True}, {"broadcast": True}, {"requires_grad": False}])
def test_opcheck_of_softmax(kwargs):
    arguments = flash_arguments(**kwargs)
    torch.library.opcheck(OPS.jagged_flash_attention.default, arguments)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    out, lse = flash_ops.forward_op(*plain)
    for grad_lse, needs in ((None, (True, True, False)), (torch.ones_like(lse), (True, False, False))):
        backward = (torch.ones_like(out), grad_lse, out, lse, *plain, *needs)
        torch.library.opcheck(OPS.jagged_flash_attention_backward.default, backward)


@pytest.mark.parametrize("kwargs", [{}, {"targets": True}, {"broadcast": True}, {"requires_grad": False}])
def test_opcheck_of_gdpa(kwargs):
    arguments = gdpa_arguments(**kwargs)
    torch.library.opcheck(OPS.gdpa.default, arguments)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    out = gdpa_ops.forward_op(*plain)
    torch.library.opcheck(OPS.gdpa_backward.default, (torch.ones_like(out), *plain, True, False))
