"""Tests long lists, sizes around every boundary, and views of one flat buffer, which merge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import ops_reference as ref
from helpers.ops_tensors import DTYPES, Guarded, check_guards, contiguous, tensors, values
from torch import Tensor

import spectrain_ext as st

# Vectors, unrolled loops, chunks of 4096 elements, pages, and the threshold for threads.
_BOUNDARIES = [2**k + d for k in (10, 11, 12, 13, 14, 16, 17) for d in (-1, 0, 1)]


def _guarded(sizes: list[int], dtype: torch.dtype, seed: int, offset: int = 0) -> list[Guarded]:
    rng = np.random.default_rng(seed)
    return [
        Guarded(contiguous(n).at(offset), dtype).filled(values(rng, "normal", n, dtype))
        for n in sizes
    ]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_sizes_around_boundaries(dtypes: tuple[torch.dtype, torch.dtype], offset: int) -> None:
    w = _guarded(_BOUNDARIES, dtypes[0], 0, offset)
    v = _guarded(_BOUNDARIES, dtypes[1], 1)
    kept = _guarded(_BOUNDARIES, dtypes[0], 2, 2 * offset)
    before = [ref.clone(t) for t in tensors(w)]
    expected = [
        ref.predict(a, b, lr=0.1, steps=2.0) for a, b in zip(tensors(w), tensors(v), strict=True)
    ]
    st.stash_predict_(tensors(w), tensors(kept), tensors(v), lr=0.1, steps=2.0)
    ref.assert_lists(tensors(w), expected, "params")
    ref.assert_lists(tensors(kept), before, "stashed", exact=True)
    st.swap_(tensors(w), tensors(kept))
    ref.assert_lists(tensors(w), before, "params", exact=True)
    check_guards(params=w, momentum_buffers=v, stashed=kept)


@pytest.mark.parametrize("count", [300, 999, 1000, 1001, 3000])
def test_hundreds_of_tensors(count: int) -> None:
    """All types mixed; a kernel's table moves at about a thousand rows."""
    rng = np.random.default_rng(count)
    w, g, v, out = ([] for _ in range(4))
    for i in range(count):
        wt, vt = DTYPES[i % len(DTYPES)]
        n = int(rng.integers(0, 40))
        for stream, dtype in ((w, wt), (g, wt), (v, vt), (out, wt)):
            stream.append(Guarded(contiguous(n), dtype).filled(values(rng, "normal", n, dtype)))
    hyper = ref.SGD(lr=0.1, momentum=0.9, weight_decay=0.01)
    expected = [hyper.step(*row) for row in zip(tensors(w), tensors(g), tensors(v), strict=True)]
    st.sgd_step_(
        tensors(w), tensors(g), tensors(v), predict=[(3.0, tensors(out))], **hyper.keywords()
    )
    ref.assert_lists(tensors(w), [a for a, _ in expected], "params")
    ref.assert_lists(tensors(v), [b for _, b in expected if b is not None], "momentum_buffers")
    later = st.predict(tensors(w), tensors(v), lr=0.1, steps=3.0)
    ref.assert_lists(tensors(out), later, "predict[0]")
    check_guards(params=w, grads=g, momentum_buffers=v, out=out)


def _views(flat: Tensor, sizes: list[int], gap: int) -> list[Tensor]:
    out, at = [], 0
    for n in sizes:
        out.append(flat[at : at + n])
        at += n + gap
    return out


@pytest.mark.parametrize("gap", [0, 1, 5])
@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_views_of_one_buffer_give_the_bits_of_separate_tensors(gap: int, order: str) -> None:
    """Adjacent tensors are merged if they are adjacent in every stream; gaps must not change."""
    sizes = [64, 1, 7, 0, 4096, 33, 128, 5000, 3]
    total = sum(sizes) + gap * len(sizes)
    hyper = ref.SGD(lr=0.1, momentum=0.9, nesterov=True)
    flats = [torch.randn(total) for _ in range(4)]
    before = [f.clone() for f in flats]
    streams = [_views(f, sizes, gap) for f in flats]
    index = list(range(len(sizes)))
    if order == "backward":
        index.reverse()
    elif order == "shuffled":
        index = [4, 0, 1, 8, 7, 6, 2, 3, 5]
    w, g, v, out = ([s[i] for i in index] for s in streams)
    apart = [[t.clone() for t in s] for s in (w, g, v, out)]
    st.sgd_step_(w, g, v, predict=[(2.0, out)], **hyper.keywords())
    st.sgd_step_(apart[0], apart[1], apart[2], predict=[(2.0, apart[3])], **hyper.keywords())
    for name, together, alone in zip(("w", "g", "v", "out"), (w, g, v, out), apart, strict=True):
        ref.assert_lists(together, alone, name, exact=True)
    covered = torch.zeros(total, dtype=torch.bool)
    for t in _views(covered, sizes, gap):
        t.fill_(True)
    for flat, was in zip(flats, before, strict=True):
        ref.assert_bits(flat[~covered], was[~covered], "gaps")


def test_neighbours_in_one_stream_only_are_not_merged_into_the_others() -> None:
    flat = torch.randn(60)
    w = [flat[:20], flat[20:40], flat[40:]]
    v = [torch.randn(20) for _ in range(3)]
    expected = [ref.predict(a, b, lr=1.0, steps=1.0) for a, b in zip(w, v, strict=True)]
    st.predict_(w, v, lr=1.0, steps=1.0)
    ref.assert_lists(w, expected, "params")


def test_first_step_and_missing_gradients_split_what_could_merge() -> None:
    """Rows that touch but differ in their flags."""
    flats = [torch.randn(50) for _ in range(3)]
    w, g, v = ([f[i * 10 : i * 10 + 10] for i in range(5)] for f in flats)
    grads: list[Tensor | None] = list(g)
    grads[2] = None
    first = [True, True, False, False, True]
    hyper = ref.SGD(lr=0.1, momentum=0.9)
    expected = [hyper.step(a, b, c, first=f) for a, b, c, f in zip(w, grads, v, first, strict=True)]
    st.sgd_step_(w, grads, v, first_step=first, **hyper.keywords())
    ref.assert_lists(w, [a for a, _ in expected], "params")
    ref.assert_lists(v, [b for _, b in expected if b is not None], "momentum_buffers")


def test_empty_lists_and_empty_tensors() -> None:
    st.predict_([], [], lr=0.1, steps=1.0)
    assert list(st.predict([], [], lr=0.1, steps=1.0)) == []
    assert list(st.stash([])) == []
    st.restore_([], [])
    st.swap_([], [])
    st.stash_predict_([], [], [], lr=0.1, steps=1.0)
    st.sgd_step_([], [], [], lr=0.1, momentum=0.9, predict=[(1.0, [])])
    for shape in [(0,), (3, 0), (0, 2, 2)]:
        empty = [torch.empty(shape) for _ in range(3)]
        st.predict_(empty[0], empty[1], lr=0.1, steps=1.0)
        st.stash_predict_(*empty, lr=0.1, steps=1.0)
        st.sgd_step_(*empty, lr=0.1, momentum=0.9)
        assert st.stash(empty[0]).shape == shape


def test_tuples_and_parameter_generators() -> None:
    module = torch.nn.Linear(4, 3)
    v = tuple(torch.randn_like(p) for p in module.parameters())
    expected = [
        ref.predict(p, b, lr=0.1, steps=2.0) for p, b in zip(module.parameters(), v, strict=True)
    ]
    got = st.predict(tuple(module.parameters()), v, lr=0.1, steps=2.0)
    ref.assert_lists(list(got), expected, "tuple")
