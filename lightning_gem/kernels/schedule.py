"""Work lists for kernels over jagged batches: which (sequence, tile) pairs there are, longest work first.

A grid over (batch, longest sequence) is mostly empty where lengths differ, and its long sequences may come last. So the
work is listed: only tiles with rows in them, the most expensive first. The list is built on the device, from offsets
that are there already, without waiting for it; the host only knows an upper bound of its length.
"""

import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

Order = Literal["lpt", "none"]

# The kernel compares every pair of sequences, which is faster than sorting up to about here.
_MAX_SEQUENCES_FOR_KERNEL = 32_768


@dataclass(frozen=True)
class TileSchedule:
    """Tiles of ``block_size`` rows that cover every sequence; entries from ``num_tiles`` on are in range, but no work.

    There are always enough spare entries to cover the slack rows (those behind the last sequence) with tiles, too:
    spare entry j, counted from ``num_tiles``, may stand for the rows from ``cu_seqlens[-1] + j * block_size`` on.

    Attributes:
        sequence: Sequence of each tile, int32 (capacity,).
        tile: Its number within the sequence, int32 (capacity,).
        num_tiles: Number of real tiles, int32 (1,), on the device.
        block_size: Rows per tile.
        storage: All of the above one behind the other, int32 (2 * capacity + 1,).
    """

    sequence: Tensor
    tile: Tensor
    num_tiles: Tensor
    block_size: int
    storage: Tensor

    @classmethod
    def from_storage(cls, storage: Tensor, block_size: int) -> "TileSchedule":
        """The schedule whose parts lie in one tensor."""
        capacity = len(storage) // 2
        sequence, tile, num_tiles = storage.split([capacity, capacity, 1])
        return cls(sequence, tile, num_tiles, block_size, storage)

    @property
    def capacity(self) -> int:
        """Length of the list, known to the host."""
        return len(self.sequence)


def build_tile_schedule(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None = None,
    *,
    block_m: int,
    num_rows: int,
    order: Order = "lpt",
) -> TileSchedule:
    """Lists the tiles of a batch's queries. Deterministic, asynchronous, and at most a few launches.

    Method: the tile lists of Meta's GDPA kernels (pytorch.org/blog, "Generalized Dot-Product Attention", 2026), which
    are made on the CPU there; longest processing time first (Graham, 1969).

    Args:
        cu_seqlens_q: Offsets (B+1,) of the side that is tiled, int32 or int64; None: every sequence has the same
            ``num_rows`` rows (broadcast queries).
        cu_seqlens_k: Offsets of the other side, whose lengths decide the order; None takes ``cu_seqlens_q``.
        block_m: Rows per tile.
        num_rows: Rows of the packed tensor that is tiled, slack included.
        order: ``lpt`` puts sequences that are longest on the other side first, ties in the order of the batch; ``none``
            keeps the order of the batch.

    Returns:
        The schedule, on the device of the offsets.

    Raises:
        ValueError: Without any offsets, for a block below 1, or an unknown order.
    """
    other = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    if other is None:
        raise ValueError("cu_seqlens_q and cu_seqlens_k are both None: pass the offsets of one side at least")
    if block_m < 1 or order not in ("lpt", "none"):
        raise ValueError(f"block_m must be at least 1 and order 'lpt' or 'none', got {block_m} and {order!r}")
    num_sequences = len(other) - 1
    capacity = _capacity(cu_seqlens_q is None, num_rows, num_sequences, block_m)
    build = _build_on_device if _has_kernel(other) and num_sequences <= _MAX_SEQUENCES_FOR_KERNEL else _build
    return build(cu_seqlens_q, other, block_m, num_rows, order, capacity)


def _capacity(is_shared: bool, num_rows: int, num_sequences: int, block_size: int) -> int:
    """The most tiles that there can be, and one more, so that slack that straddles tiles is covered."""
    if is_shared:
        return num_sequences * -(-num_rows // block_size) + 1
    return num_rows // block_size + num_sequences + 1


class Schedules:
    """The schedules of one attention call, built when first asked for, and shared by all calls on the same offsets.

    Args:
        cu_seqlens_q: Query offsets, or None with broadcast queries.
        cu_seqlens_k: Key offsets.
        num_queries: Rows of the packed queries; of the shared ones with broadcast queries.
        num_keys: Rows of the packed keys.
        given: Schedules that the caller has; one is taken where the block size is right.
        share: Keep what is built for other calls on the same offsets tensors. Off in compiled graphs, which may write
            new offsets into the memory of old ones.
    """

    def __init__(
        self,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor,
        num_queries: int,
        num_keys: int,
        given: TileSchedule | None = None,
        share: bool = True,
    ) -> None:
        self.cu_seqlens_q = cu_seqlens_q
        self.cu_seqlens_k = cu_seqlens_k
        self.num_queries = num_queries
        self.num_keys = num_keys
        self.given = given
        self.share = share

    def queries(self, block_size: int) -> TileSchedule:
        """Tiles of the queries, those that see the longest keys first.

        Raises:
            ValueError: If the given schedule was built for other numbers of rows or sequences.
        """
        if self.given is not None and self.given.block_size == block_size:
            size = (self.cu_seqlens_q is None, self.num_queries, len(self.cu_seqlens_k) - 1, block_size)
            if self.given.capacity != _capacity(*size):
                raise ValueError(
                    f"schedule has room for {self.given.capacity} tiles, but these queries need {_capacity(*size)}: "
                    "build it with the offsets and the number of rows of this call, or pass None"
                )
            return self.given
        return self._get("queries", block_size)

    def keys(self, block_size: int) -> TileSchedule:
        """Tiles of the keys, those that the most queries see first."""
        return self._get("keys", block_size)

    def _get(self, side: Literal["queries", "keys"], block_size: int) -> TileSchedule:
        tiled, other, rows = self.cu_seqlens_q, self.cu_seqlens_k, self.num_queries
        if side == "keys":
            tiled, other, rows = self.cu_seqlens_k, self.cu_seqlens_q, self.num_keys  # type: ignore[assignment]
        if not (self.share and _may_share(self.cu_seqlens_q, self.cu_seqlens_k)):
            return build_tile_schedule(tiled, other, block_m=block_size, num_rows=rows)
        return _shared(tiled, other, block_size, rows)


# Per offsets tensor: what was built from it. An entry counts while both tensors live, unchanged, on the same stream.
_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_dense: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _shared(tiled: Tensor | None, other: Tensor | None, block_size: int, num_rows: int) -> TileSchedule:
    anchor = other if tiled is None else tiled
    assert anchor is not None
    partner = other if tiled is not None else None
    stream = torch.cuda.current_stream(anchor.device).cuda_stream if anchor.is_cuda else 0
    key = (tiled is None, id(partner), block_size, num_rows, stream)
    stamp = (anchor._version, None if partner is None else partner._version)
    entries: dict[Any, tuple[Any, Any, TileSchedule]] = _cache.setdefault(anchor, {})
    found = entries.get(key)
    if found is not None and found[0]() is partner and found[1] == stamp:
        return found[2]
    for stale in [k for k, (alive, _, _) in list(entries.items()) if k[1] != id(None) and alive() is None]:
        entries.pop(stale, None)
    schedule = build_tile_schedule(tiled, other, block_m=block_size, num_rows=num_rows)
    # The stamp holds no reference to the partner, so the cache keeps neither tensor alive.
    entries[key] = (_nothing if partner is None else weakref.ref(partner), stamp, schedule)
    return schedule


def dense_offsets(cu_seqlens: Tensor, length: int) -> Tensor:
    """Offsets of as many sequences as ``cu_seqlens`` has, all of one length: one tensor for all layers of a step.

    So schedules that depend on it are shared, too.
    """
    plain = type(cu_seqlens) is Tensor and not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode()
    if not (plain and _may_share(cu_seqlens)):
        return length * torch.arange(len(cu_seqlens), dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    entries = _dense.setdefault(cu_seqlens, {})
    if length not in entries:
        entries[length] = length * torch.arange(len(cu_seqlens), dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return entries[length]


def _nothing() -> None:
    return None


def _may_share(*offsets: Tensor | None) -> bool:
    """Inference tensors count no versions; a captured graph replays the launches of the capture, and nothing else."""
    known = [x for x in offsets if x is not None]
    if torch.is_inference_mode_enabled() or any(x.is_inference() for x in known):
        return False
    return not (known[0].is_cuda and torch.cuda.is_current_stream_capturing())


def _has_kernel(offsets: Tensor) -> bool:
    return offsets.is_cuda and torch.version.hip is None


def _build(
    tiled: Tensor | None, other: Tensor, block_size: int, num_rows: int, order: Order, capacity: int
) -> TileSchedule:
    """In torch operations, on any device."""
    lengths_other = other.diff()
    num_sequences = len(lengths_other)
    lengths = torch.full_like(lengths_other, num_rows) if tiled is None else tiled.diff()
    device = other.device
    if num_sequences == 0:
        return TileSchedule.from_storage(torch.zeros(2 * capacity + 1, dtype=torch.int32, device=device), block_size)
    if order == "lpt":
        ranked = torch.argsort(lengths_other, descending=True, stable=True)
    else:
        ranked = torch.arange(num_sequences, device=device)
    tiles = ((lengths + block_size - 1) // block_size)[ranked]
    ends = tiles.cumsum(0)
    item = torch.arange(capacity, device=device)
    place = torch.searchsorted(ends, item, right=True).clamp(max=num_sequences - 1)
    tile = torch.where(item < ends[-1], item - (ends - tiles)[place], 0)
    return TileSchedule.from_storage(torch.cat([ranked[place], tile, ends[-1:]]).int(), block_size)


def _build_on_device(
    tiled: Tensor | None, other: Tensor, block_size: int, num_rows: int, order: Order, capacity: int
) -> TileSchedule:
    """In one launch of a kernel."""
    from lightning_gem.kernels.attention.triton_schedule import fill_schedule

    storage = torch.zeros(2 * capacity + 1, dtype=torch.int32, device=other.device)
    schedule = TileSchedule.from_storage(storage, block_size)
    fill_schedule(tiled, other, schedule, num_rows, order == "lpt")
    return schedule
