"""Tests stash, restore_ and swap_: every bit, NaN payloads too."""

from __future__ import annotations

import pytest
import torch
from helpers import ops_reference as ref
from helpers.ops_tensors import (
    DTYPES,
    Case,
    Guarded,
    as_list,
    cases,
    channels_last,
    check_guards,
    contiguous,
    tensors,
)
from hypothesis import given

import spectrain_ext as st


@given(case=cases())
def test_stash_then_restore_is_bitwise(case: Case) -> None:
    w, kept = case.stream(0, kind="bits"), case.stream(1)
    before = [ref.clone(t) for t in tensors(w)]
    given_out = case.given(kept)
    result = st.stash(case.given(w), given_out)
    assert result is given_out or all(
        a is b.tensor for a, b in zip(as_list(result), kept, strict=True)
    )
    ref.assert_lists(tensors(kept), before, "stashed", exact=True)
    for t in tensors(w):
        t.zero_()
    st.restore_(case.given(w), case.given(kept))
    ref.assert_lists(tensors(w), before, "restored", exact=True)
    check_guards(params=w, stashed=kept)


@given(case=cases())
def test_stash_allocates_like_params(case: Case) -> None:
    w = case.stream(0, kind="bits")
    result = st.stash(case.given(w))
    assert isinstance(result, torch.Tensor) == case.single
    ref.assert_lists(as_list(result), tensors(w), "stashed", exact=True)
    for r, a in zip(as_list(result), tensors(w), strict=True):
        assert r.numel() == 0 or (r.stride() == a.stride() and r.data_ptr() != a.data_ptr())
        assert not r.requires_grad


@given(case=cases())
def test_swap(case: Case) -> None:
    a, b = case.stream(0, kind="bits"), case.stream(1, kind="bits")
    was_a, was_b = ([ref.clone(t) for t in tensors(s)] for s in (a, b))
    st.swap_(case.given(a), case.given(b))
    ref.assert_lists(tensors(a), was_b, "a", exact=True)
    ref.assert_lists(tensors(b), was_a, "b", exact=True)
    check_guards(a=a, b=b)


@pytest.mark.parametrize("dtype", sorted({w for w, _ in DTYPES}, key=str), ids=str)
def test_every_nan_payload_of_16_bits_and_some_of_more(dtype: torch.dtype) -> None:
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    if dtype.itemsize == 2:
        raw = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(ints)
    else:
        info = torch.iinfo(ints)
        raw = torch.randint(info.min, info.max, (2**16,), dtype=ints)
    w = raw.view(dtype).clone()
    kept = st.stash(w)
    w.fill_(1.0)
    st.restore_(w, kept)
    assert torch.equal(w.view(ints), raw)
    other = torch.zeros_like(w)
    st.swap_(w, other)
    assert torch.equal(other.view(ints), raw) and int(w.view(ints).count_nonzero()) == 0


@pytest.mark.parametrize("offset", range(17))
def test_every_alignment_against_every_other(offset: int) -> None:
    """Views that start off a vector boundary, source and target differently."""
    for other in range(17):
        source = Guarded(contiguous(133).at(offset), torch.float16).filled(
            torch.arange(133, dtype=torch.float16)
        )
        target = Guarded(contiguous(133).at(other), torch.float16)
        st.restore_(target.tensor, source.tensor)
        assert torch.equal(target.tensor, source.tensor)
        check_guards(source=[source], target=[target])


def test_channels_last_keeps_its_strides() -> None:
    w = Guarded(channels_last(4, 3, 5, 7), torch.float32).filled(torch.randn(420)).tensor
    assert w.is_contiguous(memory_format=torch.channels_last)
    kept = st.stash(w)
    assert kept.stride() == w.stride() and torch.equal(kept, w)


def test_strides_of_dimensions_of_size_one_do_not_matter() -> None:
    """Autograd hands out gradients whose strides differ there."""
    w = torch.randn(4, 1, 3)
    odd = torch.empty(12).as_strided((4, 1, 3), (3, 77, 1))
    st.restore_(odd, w)
    assert torch.equal(odd, w)
    v = torch.randn(4, 1, 3)
    st.predict_(odd, v, lr=0.5, steps=1)
    ref.assert_same(odd, ref.predict(w, v, lr=0.5, steps=1), "predict_")
