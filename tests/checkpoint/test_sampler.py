"""Tests the resumable order of minibatches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from spectrain_ext.checkpoint import ShuffledSampler


def epochs(sampler, count):
    return [list(sampler) for _ in range(count)]


@given(
    samples=some.integers(1, 20),
    batch=some.integers(1, 7),
    drop=some.booleans(),
    seed=some.integers(0, 2**40),
)
def test_every_sample_once_per_epoch(samples, batch, drop, seed):
    drop = drop and samples >= batch
    sampler = ShuffledSampler(samples, batch, seed=seed, drop_last=drop)
    for epoch in range(3):
        assert sampler.epoch == epoch
        found = list(sampler)
        assert len(found) == len(sampler)
        flat = [index for rows in found for index in rows]
        assert len(set(flat)) == len(flat)
        assert set(flat) <= set(range(samples))
        assert drop or len(flat) == samples
        assert all(len(rows) == batch for rows in found[: None if drop else -1])


@given(stop=some.integers(0, 12))
def test_going_on_anywhere(stop):
    whole = [rows for epoch in epochs(ShuffledSampler(10, 3, seed=5), 3) for rows in epoch]
    sampler = ShuffledSampler(10, 3, seed=5)
    seen = []
    while len(seen) < stop:
        for rows in sampler:
            seen.append(rows)
            if len(seen) == stop:
                break
    other = ShuffledSampler(10, 3, seed=77)
    other.load_state_dict(sampler.state_dict())
    assert other.position == stop
    rest = []
    while len(seen) + len(rest) < len(whole):
        rest += list(other)
    assert seen + rest == whole


def test_epochs_and_seeds_differ_and_nothing_else_matters():
    first, second = epochs(ShuffledSampler(50, 50), 2)
    assert first != second
    assert epochs(ShuffledSampler(50, 50, seed=1), 1) != [first]
    state = torch.get_rng_state()
    torch.manual_seed(123)
    assert epochs(ShuffledSampler(50, 50), 2) == [first, second]
    torch.set_rng_state(state)
    assert torch.equal(torch.get_rng_state(), state)


def test_bad_sizes():
    for sizes, match in (
        ((0, 1), "samples: expected at least 1, got 0"),
        ((1, 0), "batch_size: expected at least 1, got 0"),
        ((3, 4), r"batch_size: expected at most 3 \(samples\) with drop_last, got 4"),
    ):
        with pytest.raises(ValueError, match=match):
            ShuffledSampler(*sizes, drop_last=True)


def test_another_state():
    sampler = ShuffledSampler(10, 3)
    before = sampler.state_dict()
    for key, value, match in (
        ("batch_size", 2, "batch_size: expected 3, got 2"),
        ("samples", None, "samples: expected 10, got None"),
    ):
        with pytest.raises(ValueError, match=match):
            sampler.load_state_dict({**before, key: value})
        assert sampler.state_dict() == before
