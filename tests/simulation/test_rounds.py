"""Tests relations between the paper's horizon, the count in rounds and the local count."""

from __future__ import annotations

import pytest

from spectrain_ext.schedule import Kind
from spectrain_ext.simulation import Durations, simulate, streams


def counted(windows, microbatches=1, **durations):
    """Updates of every stage for other minibatches before one ends on all, as (forward, backward).

    The forward counts from the version that it read, the backward from the one current then.
    """
    n, minibatch = len(windows), max(windows) + 1
    read, updates = [0] * n, [[] for _ in range(n)]
    actions = streams("1f1b-async", windows, microbatches)
    times = Durations.of(n, **durations)
    for span in simulate(actions, times, minibatches=minibatch + n + 1):
        if span.kind is Kind.UPDATE:
            updates[span.stage].append(span.end)
        elif span.kind is Kind.FORWARD and (span.minibatch, span.microbatch) == (minibatch, 0):
            read[span.stage] = span.version
    end = updates[0][minibatch]
    others = [sum(time <= end for time in updates[k]) - 1 for k in range(n)]
    return [(others[k] - read[k], others[k] - minibatch) for k in range(n)]


def local(windows):
    """Updates between a minibatch's forward and its backward on the same stage."""
    n, settled = len(windows), max(windows) + 1
    read = {}
    actions = streams("1f1b-async", windows)
    for span in simulate(actions, Durations.of(n), minibatches=settled + 1):
        if span.minibatch == settled:
            read[span.stage, span.kind] = span.version
    return [read[k, Kind.BACKWARD] - read[k, Kind.FORWARD] for k in range(n)]


def classic(n):
    return [n - k for k in range(n)]


@pytest.mark.parametrize("n", range(1, 65))
def test_the_closed_form_is_the_count_in_rounds(n):
    rounds = [(k // 2 + n - k - 1, k // 2) for k in range(n)]
    assert counted(classic(n)) == rounds
    # Locally a minibatch ends with its own backward: the k//2 rounds after it do not count.
    assert local(classic(n)) == [forward - after for forward, after in rounds]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 16])
def test_it_holds_for_rounds_of_equal_halves_only(n):
    """After its own backward a minibatch needs k further backwards, and the period is F + B."""
    assert counted(classic(n), forward=1, backward=2) == [
        (2 * k // 3 + n - k - 1, 2 * k // 3) for k in range(n)
    ]
    assert counted(classic(n), forward=2, backward=1) == [
        (k // 3 + n - k - 1, k // 3) for k in range(n)
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
def test_another_window_changes_the_forward_only(n):
    wide = [2 * (n - k) - 1 for k in range(n)]
    assert local(wide) == [w - 1 for w in wide]
    for k, (forward, backward) in enumerate(counted(wide)):
        assert backward == k // 2
        assert forward == k // 2 + wide[k] - 1


@pytest.mark.parametrize("n", [2, 4, 8])
def test_accumulation_shortens_it(n):
    """With M microbatches per update, by a factor of about M."""
    for k, (forward, backward) in enumerate(counted(classic(n), microbatches=n)):
        assert backward <= 1
        assert 0 <= forward - backward <= 1, k
