"""Tests relations between the paper's horizon, the count in rounds and the local count."""

from __future__ import annotations

import pytest
from helpers.schedules import classic, wide

from spectrain_ext.schedule import Kind
from spectrain_ext.tools.simulation import Durations, simulate, streams


def counted(windows: list[int], microbatches: int = 1, **durations: float) -> list[tuple[int, int]]:
    """Updates of every stage for other minibatches before one ends on all, as (forward, backward).

    The forward counts from the version that it read, the backward from the one current then.
    """
    n, minibatch = len(windows), max(windows) + 1
    read = [0] * n
    updates: list[list[float]] = [[] for _ in range(n)]
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


@pytest.mark.parametrize("n", [*range(1, 9), 16, 31])
def test_the_closed_form_is_the_count_in_rounds_of_equal_halves_only(n: int) -> None:
    assert counted(classic(n)) == [(k // 2 + n - k - 1, k // 2) for k in range(n)]
    # another window changes the forward only
    assert counted(wide(n)) == [(k // 2 + w - 1, k // 2) for k, w in enumerate(wide(n))]
    # after its own backward a minibatch needs k further backwards, and the period is F + B
    for forward, backward in ((1, 2), (2, 1)):
        after = [backward * k // 3 for k in range(n)]
        found = counted(classic(n), forward=forward, backward=backward)
        assert found == [(after[k] + n - k - 1, after[k]) for k in range(n)]
    # several microbatches per update shorten it, by a factor of about their number
    for k, (ahead, behind) in enumerate(counted(classic(n), microbatches=n) if n > 1 else ()):
        assert behind <= 1
        assert 0 <= ahead - behind <= 1, k
