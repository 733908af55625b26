# mypy: ignore-errors
"""The Triton rival: a step of SGD and up to two predictions. Imported only with Triton."""

import triton
import triton.language as tl


@triton.jit
def kernel(
    w_pointer,
    v_pointer,
    g_pointer,
    o_pointer,
    p_pointer,
    n,
    lr,
    momentum,
    first,
    second,
    STEP: tl.constexpr,
    PREDICTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process one block of one tensor."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    w = tl.load(w_pointer + at, mask=inside)
    v = tl.load(v_pointer + at, mask=inside)
    if STEP:
        v = momentum * v + tl.load(g_pointer + at, mask=inside)
        w = w - lr * v
        tl.store(v_pointer + at, v, mask=inside)
        tl.store(w_pointer + at, w, mask=inside)
    if PREDICTIONS > 0:
        tl.store(o_pointer + at, w - first * v, mask=inside)
    if PREDICTIONS > 1:
        tl.store(p_pointer + at, w - second * v, mask=inside)
