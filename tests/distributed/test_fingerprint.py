"""Fingerprints of batches: equal for equal values, and what they are to tell apart."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch

from spectrain_ext.distributed.fingerprint import Fingerprint

LARGE = (7, 3, 33, 35)  # more elements than are looked at


def of(value, target=None, i=0):
    return Fingerprint.of(i, (value, torch.arange(3) if target is None else target))


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_it_fits_into_a_header():
    for seed in range(50):
        for side in of(random(4, seed=seed)):
            assert -(2**63) <= side < 2**63


@pytest.mark.parametrize("shape", [(), (0,), (5,), (8, 6), (64, 64), (91, 91), LARGE], ids=str)
def test_memory_formats_and_tuples_make_no_difference(shape):
    x = random(*shape)
    expected = of(x)
    padded = torch.zeros(*shape, 2)
    padded[..., 0] = x
    assert of(padded[..., 0]) == expected
    if x.dim() > 1:
        assert of(x.transpose(0, -1).contiguous().transpose(0, -1)) == expected
    if x.dim() == 4:
        assert of(x.to(memory_format=torch.channels_last)) == expected
    assert of((x, x)) == of([x, x])
    assert of((x,)) == expected
    assert Fingerprint.of(0, (x.requires_grad_(), torch.arange(3))) == expected


@pytest.mark.parametrize("shape", [(8, 6), (64, 64), LARGE], ids=str)
def test_what_differs_does_not_match(shape):
    x, y = random(*shape), torch.arange(shape[0])
    mine = of(x, y)
    for other in (random(*shape, seed=1), x.flip(0), x[1:], x.reshape(-1), (x, x)):
        theirs = of(other, y + 1)
        assert theirs.input != mine.input
        assert not theirs.matches(mine)
    assert not of(x, y, i=1).matches(mine)
    assert of(x, y.flip(0)).target != mine.target
    # One side is enough.
    assert of(x, y[:0]).matches(mine)
    assert of(x + 1, y).matches(mine)


def test_mappings():
    """All of it, or its integers, which augmentations leave alone."""
    images, labels = random(6, 5), torch.arange(6)
    mask = torch.ones(6, dtype=torch.bool)

    def mapped(i=0, **batch):
        return Fingerprint.of(i, batch)

    mine = mapped(images=images, labels=labels, mask=mask)
    assert mapped(mask=mask, labels=labels, images=images) == mine
    assert Fingerprint.of(0, UserDict(images=images, labels=labels, mask=mask)) == mine
    assert mapped(images=images + 1, labels=labels, mask=mask).matches(mine)
    for other in (
        mapped(i=1, images=images, labels=labels, mask=mask),
        mapped(images=images, labels=labels.flip(0), mask=mask),
        mapped(images=images, other=labels, mask=mask),
        mapped(images=images, labels=labels, mask=mask, more=labels),
    ):
        assert not other.matches(mine)
    # Without integers all counts.
    mine = mapped(images=images, mask=mask)
    assert mapped(images=images, mask=mask).matches(mine)
    assert not mapped(images=images + 1, mask=mask).matches(mine)
    # As one side of a pair.
    assert of({"a": images, "b": labels}).input == of({"b": labels, "a": images}).input
    assert of({"a": images}).input != of({"b": images}).input


def test_elements_that_change_places_are_seen_wherever_the_sample_has_them():
    x = random(64, 64)  # all of it
    mine = of(x)
    for row in range(1, 64):
        changed = x.clone()
        changed[[0, row]] = changed[[row, 0]]
        assert of(changed).input != mine.input


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
def test_few_bits_are_enough(dtype):
    """Zeros and ones, and signs, which as floats differ in their first bits only."""
    draws = [random(10, 10, seed=seed).sign().to(dtype) for seed in range(100)]
    draws += [draw.clamp(min=0) for draw in draws]
    assert len({of(draw).input for draw in draws}) == len(draws)


@pytest.mark.parametrize("size", [128, 256, 1024])
def test_not_the_same_column_of_every_row(size):
    x = torch.zeros(4, size, size)
    x[:, :, 1:] = 1.0
    y = x.clone()
    y[:, size // 2 :, size // 2] = 2.0
    assert of(x).input != of(y).input


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16),
        *(torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_every_dtype(dtype):
    x = random(100, 100).mul(4)
    value = x > 0 if dtype is torch.bool else x.abs().to(dtype)
    mine = of(value)
    assert of(value.clone()) == mine
    assert of(value.t()).input != mine.input
    assert of(value.t().contiguous()) == of(value.t())
    if dtype.is_complex:
        assert of(value.conj()) == of(value.conj().resolve_conj()) != mine
