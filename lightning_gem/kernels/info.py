"""What runs where: a look at the choice that an attention op makes, without running it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gem.kernels.attention import dispatch
from lightning_gem.kernels.attention.spec import AttentionSpec
from lightning_gem.kernels.checks import check_backend, check_qkv
from lightning_gem.kernels.dot_product.activations import check_activation


def kernel_info(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    attn_bias: Tensor | None = None,
    activation: str | Sequence[str] = "gelu_tanh",
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    broadcast_query: bool = False,
    num_targets: Tensor | None = None,
    contextual_seqlen: int = 0,
    softcap: float = 0.0,
    backend: str = "auto",
    self_attention: bool | None = None,
) -> dict[str, Any]:
    """Says which code would compute an attention op, and with which block sizes.

    Args:
        op: ``jagged_flash_attention`` or ``gdpa``. ``pma_attention`` and ``pffn`` are these two with
            ``broadcast_query=True``, and with dense keys flattened to (B*N, Hkv, D).
        query: As the op takes it; so are all other arguments.
        key: See ``query``.
        value: See ``query``.
        max_seqlen_q: See ``query``.
        max_seqlen_k: See ``query``.
        attn_bias: See ``query``.
        activation: See ``query``.
        causal: See ``query``.
        window_size: See ``query``.
        broadcast_query: See ``query``.
        num_targets: See ``query``.
        contextual_seqlen: See ``query``.
        softcap: See ``query``.
        backend: See ``query``.
        self_attention: Whether the op gets the same offsets for both sides; None: where both have as many rows.

    Returns:
        ``backend`` (``reference``, ``triton``, ``packed`` or ``hopper``); ``arch`` (``sm_90`` and the like,
        ``interpreter``, or the type of device); ``config``: block sizes per kernel, empty for the reference;
        ``emulated``: whether a precision is imitated that the device lacks, which these ops never do.

    Raises:
        ValueError: For another op, and for what the op itself refuses.
    """
    if op not in ("jagged_flash_attention", "gdpa"):
        raise ValueError(f"op {op!r} is unknown: use 'jagged_flash_attention' or 'gdpa'")
    check_qkv(query, key, value)
    check_backend(backend)
    softmax = op == "jagged_flash_attention"
    if not softmax:
        check_activation(activation, query.shape[1])
    spec = AttentionSpec(
        activation=None if softmax else activation if isinstance(activation, str) else tuple(activation),
        scale=1.0,
        causal=causal,
        window_left=window_size[0],
        window_right=window_size[1],
        broadcast_query=broadcast_query,
        contextual_seqlen=contextual_seqlen,
        has_targets=num_targets is not None,
        softcap=softcap,
    )
    bounds = (max_seqlen_q, max_seqlen_k)
    if self_attention is None:
        self_attention = len(query) == len(key) and not broadcast_query
    chosen = dispatch.choose(spec, query, key, value, *bounds, attn_bias, backend, self_attention)
    config: dict[str, Any] = {}
    if chosen == "hopper":
        from lightning_gem.kernels.attention import hopper

        config = hopper.configuration(spec, query, key, value, *bounds)
    elif chosen == "packed":
        from lightning_gem.kernels.attention import packed

        config = packed.configuration(spec, query, key, value, *bounds)
    elif chosen == "triton":
        from lightning_gem.kernels.attention import triton_kernels

        config = triton_kernels.configuration(spec, query, key, value, *bounds)
    if query.is_cuda:
        major, minor = torch.cuda.get_device_capability(query.device)
        arch = f"sm_{major}{minor}"
    else:
        arch = "interpreter" if chosen in ("triton", "packed") else query.device.type
    return {"backend": chosen, "arch": arch, "config": config, "emulated": False}
