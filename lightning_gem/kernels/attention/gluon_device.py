"""Device-side pieces that the Hopper kernels share: work items, segment-bounded copies, activations.

Gluon functions, compiled for sm_90 only. A *segment* is the rows of one sequence inside a packed tensor. Segment
descriptors bound copies in hardware: rows beyond the segment load as zeros and are not stored, so that kernels need no
masks for short tiles and never touch a neighbour's rows.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# A segment descriptor has two extra leading dimensions, whose strides cancel modulo 2^64 to any row offset; its row
# dimension ends at 2^30 (see hopper._segments).
ROW_LIMIT = gl.constexpr(1 << 30)

# x in $2; the activation to $0, its derivative to $1. As one block of PTX an element's temporaries die before the next
# element begins; as tensor operations every temporary is a whole tile, which spills in the dK, dV kernel.
GELU_WITH_DERIVATIVE = gl.constexpr("""{
.reg .f32 q, t, g, r;
mul.f32 q, $2, $2;
fma.rn.f32 t, q, 0f3D122279, 0f3F4C422A;
mul.f32 t, t, $2;
tanh.approx.f32 t, t;
fma.rn.f32 g, t, 0f3F000000, 0f3F000000;
fma.rn.f32 r, q, 0f3DDB33B6, 0f3F4C422A;
mul.f32 t, t, t;
fma.rn.f32 t, t, 0fBF000000, 0f3F000000;
mul.f32 r, r, t;
mul.f32 t, $2, g;
fma.rn.f32 $1, $2, r, g;
mov.f32 $0, t;
}""")


@gluon.jit
def item_index(round_, num_items):
    """Index of this program's work item in a round; every second round runs backwards, which evens out the loads."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    place = gl.where(round_ % 2 == 0, program, programs - 1 - program)
    return round_ * programs + place


@gluon.jit
def segment_of(cu_seqlens, sequence):
    """First row and number of rows of a sequence."""
    start = gl.load(cu_seqlens + sequence).to(gl.int32)
    return start, gl.load(cu_seqlens + sequence + 1).to(gl.int32) - start


@gluon.jit
def load_rows(descriptor, start, length, row, column, barrier, shared):
    """Starts the copy of a tile of a segment into 2-D shared memory; rows outside the segment arrive as zeros."""
    block: gl.constexpr = descriptor.block_shape
    tile = shared._reinterpret(descriptor.dtype, block, descriptor.layout)
    coordinates = [ROW_LIMIT, start + length, ROW_LIMIT - length + row, column]
    tma.async_copy_global_to_shared(descriptor, coordinates, barrier, tile)


@gluon.jit
def load_stats(descriptor, kind_and_head, entry, barrier, shared):
    """Starts the copy of a run of one row of the row statistics into shared memory (1, run)."""
    tma.async_copy_global_to_shared(descriptor, [kind_and_head, entry], barrier, shared)


@gluon.jit
def read_stats(shared, LAYOUT: gl.constexpr):
    """Row statistics from shared memory (1, run), one for every column of a tile."""
    RUN: gl.constexpr = shared.shape[1]
    return shared._reinterpret(gl.float32, [RUN], gl.SwizzledSharedLayout(1, 1, 1, [0])).load(LAYOUT)


@gluon.jit
def store_rows(descriptor, start, length, row, column, shared):
    """Starts the copy of 2-D shared memory to a tile of a segment; rows outside the segment are left out."""
    block: gl.constexpr = descriptor.block_shape
    tile = shared._reinterpret(descriptor.dtype, block, descriptor.layout)
    coordinates = [ROW_LIMIT, start + length, ROW_LIMIT - length + row, column]
    tma.async_copy_shared_to_global(descriptor, coordinates, tile)


@gluon.jit
def init_barriers(barriers, count: gl.constexpr, arrivals: gl.constexpr):
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), count=arrivals)


@gluon.jit
def stats_start(start, sequence):
    """First entry of a sequence in the row statistics (triton_row_stats), where the copy engine may start: 16 bytes."""
    return (start & -4) + sequence * 132


@gluon.jit
def own_tiles(lowest, highest, low, tiles, BLOCK: gl.constexpr, HAS_LOWEST: gl.constexpr, HAS_HIGHEST: gl.constexpr):
    """Range [first, last) of the ``tiles`` tiles from ``low`` on that reach into [lowest, highest]."""
    first, last = 0, tiles
    if HAS_LOWEST:
        first = gl.minimum(gl.maximum(lowest - low, 0) // BLOCK, tiles)
    if HAS_HIGHEST:
        last = gl.maximum(gl.minimum((highest - low + BLOCK) // BLOCK, tiles), first)
    return first, last


@gluon.jit
def in_window(key, position, window_left, window_right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """Whether a query at ``position`` sees ``key``; two sides take one comparison of unsigned numbers."""
    if HAS_LEFT and HAS_RIGHT:
        distance = (key + window_left) - position
        return distance.to(gl.uint32) <= (window_left + window_right).to(gl.uint32)
    elif HAS_LEFT:
        return key + window_left >= position
    else:
        return key <= position + window_right


@gluon.jit
def skip_tiles(step, count, full_a, empty_a, full_b, empty_b, STAGES: gl.constexpr):
    """Lets ``count`` tiles go by that another warpgroup needs; returns the next step."""
    for _ in range(count):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(full_a.index(stage), phase)
        mbarrier.arrive(empty_a.index(stage), count=1)
        mbarrier.wait(full_b.index(stage), phase)
        mbarrier.arrive(empty_b.index(stage), count=1)
        step += 1
    return step


@gluon.jit
def release_staging(empty, done):
    """Hands the buffers of the item before this one back to the producer once its results have left them."""
    tma.store_wait(0)
    if done > 0:
        mbarrier.arrive(empty.index((done - 1) % 2), count=1)


@gluon.jit
def tanh(x):
    """Hardware tanh, absolute error below 2^-10.9."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def activate(scores, scale, ACTIVATION: gl.constexpr):
    """The activation of ``scale * scores`` (float32); the scale rides along with constants where it can."""
    if ACTIVATION == "silu":
        half = scores * (0.5 * scale)
        return half * tanh(half) + half
    elif ACTIVATION == "gelu_tanh":
        half = scores * (0.5 * scale)
        linear, cubic = 0.7978845608028654 * scale, 0.035677408136300125 * scale * scale * scale
        return half * tanh(scores * (linear + cubic * (scores * scores))) + half
    elif ACTIVATION == "identity":
        return scores * scale
    elif ACTIVATION == "relu":
        return gl.maximum(scores * scale, 0.0)
    elif ACTIVATION == "relu_squared":
        positive = gl.maximum(scores * scale, 0.0)
        return positive * positive
    elif ACTIVATION == "leaky_relu":
        x = scores * scale
        return gl.where(x > 0, x, 0.01 * x)
    elif ACTIVATION == "hardswish":
        x = scores * scale
        return x * gl.minimum(gl.maximum(x * 0.16666667 + 0.5, 0.0), 1.0)
    else:
        gl.static_assert(ACTIVATION == "gelu")
        x = scores * scale
        return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))


@gluon.jit
def activate_with_derivative(scores, scale, ACTIVATION: gl.constexpr):
    """The activation of x = ``scale * scores`` (float32), and its derivative with respect to x."""
    x = scores * scale
    if ACTIVATION == "identity":
        return x, gl.full_like(x, 1.0)
    elif ACTIVATION == "relu":
        return gl.maximum(x, 0.0), gl.where(x > 0, 1.0, 0.0)
    elif ACTIVATION == "relu_squared":
        positive = gl.maximum(x, 0.0)
        return positive * positive, 2.0 * positive
    elif ACTIVATION == "leaky_relu":
        return gl.where(x > 0, x, 0.01 * x), gl.where(x > 0, 1.0, 0.01)
    elif ACTIVATION == "hardswish":
        gate = gl.minimum(gl.maximum(x * 0.16666667 + 0.5, 0.0), 1.0)
        slope = gl.where(gl.abs(x) < 3.0, x * 0.3333333333 + 0.5, gate)
        return x * gate, slope
    elif ACTIVATION == "silu":
        gate = 0.5 * tanh(0.5 * x) + 0.5
        value = x * gate
        return value, gate + (value - value * gate)
    elif ACTIVATION == "gelu":
        cumulative = 0.5 + 0.5 * gl.erf(x * 0.7071067811865476)
        return x * cumulative, cumulative + x * 0.3989422804014327 * gl.exp2(x * x * -0.7213475204444817)
    else:
        gl.static_assert(ACTIVATION == "gelu_tanh")
        return gl.inline_asm_elementwise(GELU_WITH_DERIVATIVE, "=f,=f,f", [x], (gl.float32, gl.float32), True, 1)


@gluon.jit
def hidden_score(scale, ACTIVATION: gl.constexpr):
    """A score whose weight and whose derivative are zero; softmax is ACTIVATION ""."""
    if ACTIVATION == "":
        return float("-inf")
    else:
        # Far to the left these activations are flat at zero, in float32 exactly.
        gl.static_assert(ACTIVATION != "identity" and ACTIVATION != "leaky_relu")
        return -100.0 / scale


@gluon.jit
def derivative(scores, scale, ACTIVATION: gl.constexpr):
    """The derivative of the activation at x = ``scale * scores`` (float32)."""
    if ACTIVATION == "gelu_tanh":
        x = scores * scale
        square = x * x
        t = tanh(x * (0.7978845608028654 + 0.035677408136300125 * square))
        slope = (0.5 - 0.5 * t * t) * (0.7978845608028654 + 0.10703222440890037 * square)
        return 0.5 * t + 0.5 + x * slope
    else:
        _, slope = activate_with_derivative(scores, scale, ACTIVATION)
        return slope
