# mypy: ignore-errors
"""The tile schedule in one launch: every program ranks a few sequences against all others, and writes their tiles."""

import triton
import triton.language as tl
from torch import Tensor

from lightning_gem.kernels.launch import on_device
from lightning_gem.kernels.schedule import TileSchedule

_SEQUENCES = 16
_CHUNK = 256


@triton.jit
def _tiles_of(offsets, index, num_sequences, constant_length, BLOCK_SIZE: tl.constexpr, CONSTANT: tl.constexpr):
    """Number of tiles of sequences; 0 beyond the last one."""
    inside = index < num_sequences
    if CONSTANT:
        length = tl.where(inside, constant_length, 0)
    else:
        length = (
            tl.load(offsets + index + 1, mask=inside, other=0) - tl.load(offsets + index, mask=inside, other=0)
        ).to(tl.int32)
    return (length + BLOCK_SIZE - 1) // BLOCK_SIZE


@triton.jit(do_not_specialize=["num_sequences", "constant_length"])
def schedule_kernel(
    tiled,
    other,
    sequence_out,
    tile_out,
    num_tiles_out,
    num_sequences,
    constant_length,
    BLOCK_SIZE: tl.constexpr,
    CONSTANT: tl.constexpr,
    LONGEST_FIRST: tl.constexpr,
    SEQUENCES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Places the tiles of SEQUENCES sequences behind those of all sequences that come before them."""
    mine = tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)
    inside = mine < num_sequences
    my_length = tl.load(other + mine + 1, mask=inside, other=0) - tl.load(other + mine, mask=inside, other=0)
    before = tl.zeros([SEQUENCES], dtype=tl.int32)
    total = 0
    for start in range(0, num_sequences, CHUNK):
        theirs = start + tl.arange(0, CHUNK)
        known = theirs < num_sequences
        tiles = _tiles_of(tiled, theirs, num_sequences, constant_length, BLOCK_SIZE, CONSTANT)
        total += tl.sum(tiles, axis=0)
        earlier = theirs[None, :] < mine[:, None]
        if LONGEST_FIRST:
            length = tl.load(other + theirs + 1, mask=known, other=0) - tl.load(other + theirs, mask=known, other=0)
            longer = length[None, :] > my_length[:, None]
            equal = length[None, :] == my_length[:, None]
            earlier = longer | (equal & earlier)
        before += tl.sum(tl.where(earlier, tiles[None, :], 0), axis=1)
    if tl.program_id(0) == 0:
        tl.store(num_tiles_out, total)
    my_tiles = _tiles_of(tiled, mine, num_sequences, constant_length, BLOCK_SIZE, CONSTANT)
    for start in range(0, tl.max(my_tiles, axis=0), 16):
        tile = start + tl.arange(0, 16)
        place = before[:, None] + tile[None, :]
        exists = tile[None, :] < my_tiles[:, None]
        tl.store(sequence_out + place, tl.broadcast_to(mine[:, None], place.shape), mask=exists)
        tl.store(tile_out + place, tl.broadcast_to(tile[None, :], place.shape), mask=exists)


def fill_schedule(
    tiled: Tensor | None, other: Tensor, schedule: TileSchedule, constant_length: int, longest_first: bool
) -> None:
    """Writes the lists of ``build_tile_schedule``; without ``tiled`` every sequence has ``constant_length`` rows."""
    num_sequences = len(other) - 1
    with on_device(other):
        schedule_kernel[(max(1, triton.cdiv(num_sequences, _SEQUENCES)),)](
            other if tiled is None else tiled,
            other,
            schedule.sequence,
            schedule.tile,
            schedule.num_tiles,
            num_sequences,
            constant_length,
            BLOCK_SIZE=schedule.block_size,
            CONSTANT=tiled is None,
            LONGEST_FIRST=longest_first,
            SEQUENCES=_SEQUENCES,
            CHUNK=_CHUNK,
            num_warps=4,
        )
