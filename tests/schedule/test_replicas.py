"""Tests replicated stages: the assignment of work, and that no order can deadlock."""

from __future__ import annotations

import itertools
import math
from collections import deque

import pytest

from spectrain_ext.method import find_method, places_of
from spectrain_ext.schedule import Kind, Replicas, bounded, find_generator


def test_who_is_who():
    replicas = Replicas((1, 2, 1))
    assert (replicas.ranks, replicas.stages, replicas.dealt) == (4, 3, True)
    each = [replicas.stage_and_replica(rank) for rank in range(4)]
    assert each == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert [list(replicas.ranks_of(k)) for k in range(3)] == [[0], [1, 2], [3]]
    assert [replicas.runs(1, j) for j in range(4)] == [1, 2, 1, 2]
    several = Replicas((1,) * 6, 3)
    assert (several.ranks, several.total, several.stages, several.dealt) == (3, 6, 6, False)
    assert [several.stages_on(rank) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [list(several.ranks_of(k)) for k in range(6)] == [[0], [1], [2]] * 2
    assert [several.depth(k) for k in range(6)] == [6, 5, 4, 3, 2, 1]
    assert [several.runs(k, 5) for k in range(6)] == list(range(6))
    # replicas c and d share microbatches if c and d agree modulo the common divisor
    for counts, edges in (
        ((1, 2, 1), [(0, 1), (0, 2), (1, 3), (2, 3)]),
        ((2, 4), [(0, 2), (0, 4), (1, 3), (1, 5)]),
        ((2, 3), [*itertools.product((0, 1), (2, 3, 4))]),
        ((1, 1), [(0, 1)]),
    ):
        assert list(Replicas(counts).edges()) == edges
    for given, ranks, counts in (
        *((None, 3, (1, 1, 1)), (1, 2, (1, 1)), (2, 4, (2, 2)), ([2, 1], 3, (2, 1))),
        ((3,), 3, (3,)),
    ):
        assert Replicas.of(given, ranks).counts == counts


def test_windows():
    def windows(counts, m, window=None, method="vanilla"):
        return [
            (place.window, place.microbatches)
            for place in places_of(find_method(method), len(counts), m, window, Replicas(counts))
        ]

    # PipeDream: as many minibatches as machines per replica of the input stage
    assert windows((2, 2, 1), 4, "wide") == [(5, 2), (3, 2), (1, 4)]
    assert windows((2, 1), 4, [4, 6]) == [(4, 2), (6, 4)]
    assert windows((2, 1), 4, method="gpipe") == [(2, 2), (4, 4)]
    assert windows((1, 2, 1), 2, method="1f1b") == [(2, 2), (1, 1), (1, 2)]
    for counts in itertools.product((1, 2, 3), repeat=3):
        assert windows(counts, 6) == [
            (math.ceil(sum(counts[k:]) / r), 6 // r) for k, r in enumerate(counts)
        ]
        # more messages in flight, with at most one update of delay
        for method in ("auto", "pipedream-2bw"):
            for w, m in windows(counts, 18, method=method):
                assert 1 <= w <= m
    # with one replica each, the result without replicas
    for method in ("vanilla", "gpipe", "1f1b"):
        expected = places_of(find_method(method), 3, 2)
        assert places_of(find_method(method), 3, 2, None, Replicas((1, 1, 1))) == expected


SETTINGS = [
    (counts, factor * math.lcm(*counts))
    for n in (1, 2, 3)
    for counts in itertools.product((1, 2, 3, 4), repeat=n)
    for factor in (1, 2)
]


@pytest.mark.parametrize(
    ("name", "window"),
    [
        *(("vanilla", None), ("gpipe", None), ("1f1b", None), ("vanilla", "wide")),
        *(("vanilla", 1), ("vanilla", 2), ("vanilla", 5), ("vanilla", "drawn")),
    ],
)
def test_no_deadlock_with_a_window_that_is_allowed(name, window):
    method, allowed = find_method(name), 0
    for n, (counts, m) in enumerate(SETTINGS):
        replicas = Replicas(counts)
        asked = [1 + (n + 3 * k) % 7 for k in range(len(counts))] if window == "drawn" else window
        try:
            places = places_of(method, len(counts), m, asked, replicas)
        except ValueError as error:
            assert "a deadlock" in str(error)
            continue
        allowed += 1
        assert stuck(method.schedule, places, replicas) is None, (counts, m, asked)
    assert allowed >= 30
    assert (allowed == len(SETTINGS)) == (window in (None, "wide", 1))


def test_a_window_that_is_refused_would_be_a_deadlock():
    replicas = Replicas((1, 2))
    vanilla = find_method("vanilla")
    said = (
        "window: stage 1 of 2, 3 microbatches on each of its 2 replicas, would wait for more than "
        "stage 0 sends before an update, 4 on each of its 1: a deadlock"
    )
    with pytest.raises(ValueError, match=said):
        places_of(vanilla, 2, 2, [4, 3], replicas)
    places = places_of(vanilla, 2, 2, [5, 3], replicas)
    assert stuck("1f1b-async", places, replicas) is None
    places[0] = places[0]._replace(window=4)
    assert stuck("1f1b-async", places, replicas) is not None


def stuck(schedule, places, replicas, minibatches=5):
    """Run all ranks against each other without compute; return the blocked instructions, or None.

    Messages of an edge arrive in the order of their sends. An update waits for the last backward of
    all replicas, the first microbatch of a minibatch on stage 0 for rank 0.
    """
    n = replicas.stages
    ranks = range(replicas.ranks)
    each = [replicas.stage_and_replica(rank) for rank in ranks]
    left = []
    for k, _ in each:
        actions = find_generator(schedule)(places[k])
        left.append(deque(bounded(actions, k, minibatches)))
    sent = {}  # (sender, receiver) -> messages in flight
    for a, b in replicas.edges():
        sent[a, b], sent[b, a] = deque(), deque()
    arrived = [set() for _ in range(n)]  # replicas that have reached an update
    flying = [0] * len(each)
    pulled = -1

    def can(rank, turn):
        (k, c), (kind, i, j) = each[rank], turn
        if kind is Kind.UPDATE:
            arrived[k].add((i, c))
            return all((i, other) in arrived[k] for other in range(replicas.counts[k]))
        j = c + j * replicas.counts[k]
        source = k - 1 if kind is Kind.FORWARD else k + 1
        if not 0 <= source < n:
            return kind is Kind.BACKWARD or c == 0 or i <= pulled
        edge = sent[replicas.runs(source, j), rank]
        if edge:
            assert edge[0] == (i, j), "out of order"
        return bool(edge)

    progress = True
    while progress:
        progress = False
        for rank in ranks:
            k, c = each[rank]
            while left[rank] and can(rank, left[rank][0]):
                progress = True
                kind, i, j = left[rank].popleft()
                if kind is Kind.UPDATE:
                    continue
                j = c + j * replicas.counts[k]
                forward = kind is Kind.FORWARD
                flying[rank] += 1 if forward else -1
                assert flying[rank] <= places[k].window
                if rank == 0 and forward:
                    pulled = max(pulled, i)
                source, target = (k - 1, k + 1) if forward else (k + 1, k - 1)
                if 0 <= source < n:
                    sent[replicas.runs(source, j), rank].popleft()
                if 0 <= target < n:
                    sent[rank, replicas.runs(target, j)].append((i, j))
    waiting = {rank: str(left[rank][0]) for rank in ranks if left[rank]}
    assert waiting or not any(sent.values())
    return waiting or None
