"""Tests weight versions kept and buffers needed by a schedule, without any memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from spectrain_ext.method import find_method, places_of, rules_at
from spectrain_ext.schedule import Entries, Place, count_stage, find_generator
from spectrain_ext.weights.storage import Content
from spectrain_ext.weights.versions import Versions


def counts(name, n, m=1, window=None, master=False):
    """Return the rules of every stage, and their values in a long run."""
    method = find_method(name)
    places = places_of(method, n, m, window)
    all_rules = [rules_at(method, place) for place in places]
    return [
        (rules, count_stage(method.schedule, places[0], place, rules, master))
        for place, rules in zip(places, all_rules, strict=True)
    ]


def kept(*args, master=False, **more):
    """Return the buffers apart from the working one, the master, and the previous version."""
    return [
        count.versions - 1 - (master or rules.predicts) - rules.keeps_before
        for rules, count in counts(*args, master=master, **more)
    ]


@pytest.mark.parametrize("name", ["sync", "vanilla", "spectrain", "spectrain-local", "pipeoptim"])
def test_methods_that_keep_nothing(name):
    assert kept(name, 4) == [0, 0, 0, 0]


def test_stashes():
    """The working buffer holds one of N-k versions in flight."""
    assert kept("pipedream", 4) == [3, 2, 1, 0]
    assert kept("pipedream", 4, window="wide") == [6, 4, 2, 0]
    assert kept("spectrain-stash", 4) == [3, 2, 1, 0]
    assert kept("pipedream", 4, m=4) == [1, 1, 1, 0]


def test_two_versions_of_2bw():
    assert kept("pipedream-2bw", 4, m=4) == [1, 1, 1, 1]
    assert kept("pipedream-2bw", 2, m=6) == [1, 1]


def test_vertical_sync_costs_every_stage_as_much_as_the_first():
    assert kept("pipedream-vertical-sync", 4) == [3, 3, 3, 3]


def test_xpipe_keeps_the_weights_of_its_minibatch():
    assert kept("xpipe", 4, m=4) == [1, 1, 1, 0]
    assert kept("xpipe", 4) == [0, 0, 0, 0]


def test_a_master_of_another_dtype_makes_the_newest_version_a_copy_as_well():
    assert kept("pipedream", 3, master=True) == [2, 1, 0]
    assert kept("pipedream-2bw", 3, m=3, master=True) == [1, 1, 0]


def test_microbatches_in_flight():
    def flying(*args, **more):
        return [count.in_flight for _, count in counts(*args, **more)]

    assert flying("spectrain", 4) == [4, 3, 2, 1]
    assert flying("spectrain", 4, m=3) == [4, 3, 2, 1]
    assert flying("vanilla", 4, window="wide") == [7, 5, 3, 1]
    assert flying("gpipe", 4, m=3) == [3, 3, 3, 3]
    assert flying("1f1b", 4, m=3) == [3, 3, 2, 1]


@pytest.mark.parametrize("name", ["pipedream", "second-order", "xpipe", "lwp-w"])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_the_count_does_not_depend_on_how_long_one_counts(name, m):
    method = find_method(name)
    places = places_of(method, 5, m)
    longer = places[0]._replace(window=60)  # length only: these methods do not use stage 0
    for place, (rules, expected) in zip(places, counts(name, 5, m), strict=True):
        found = count_stage(method.schedule, longer, place, rules, False)
        assert (found.versions, found.in_flight) == (expected.versions, expected.in_flight)


class Books:
    """Buffers without memory, by number."""

    same_dtype = True

    def __init__(self, master):
        self.pool = [SimpleNamespace(content=None)]
        self.home = self.true = self.pool[0]
        self.master = SimpleNamespace(content=None) if master else None

    def new_buffer(self):
        self.pool.append(SimpleNamespace(content=None))
        return self.pool[-1]


def versions(name, place, entry=None):
    method = find_method(name)
    rules = rules_at(method, place)
    books = Books(rules.predicts)
    entries = Entries(find_generator(method.schedule)(entry or place))
    return Versions(rules, place, entries, books, lambda: (0.1,)), books


def load(found, content):
    if found.find(content) is None:
        found.room(content)


def update(found, books):
    books.true = found.begin_update(None).kept or books.true


def test_pipedream_step_by_step():
    found, books = versions("pipedream", Place(0, 2, 2))
    held = lambda: [buffer.content for buffer in books.pool]  # noqa: E731
    load(found, found.for_forward(0, 0))
    load(found, found.for_forward(1, 0))
    load(found, found.for_backward(0, 0))
    assert held() == [Content(0)]
    update(found, books)  # minibatch 1 needs version 0 again: the step writes elsewhere
    assert held() == [Content(0), Content(1)]
    load(found, found.for_forward(2, 0))
    load(found, found.for_backward(1, 0))
    assert held() == [Content(0), Content(1)]
    update(found, books)  # version 1, which minibatch 2 needs again; version 0 is not needed
    assert held() == [Content(2), Content(1)]
    assert books.true is books.pool[0]


def test_entries():
    entries = Entries(find_generator("1f1b-async")(Place(0, 3, 3, 2)))
    found = [entries.take(i, j) for i in range(4) for j in range(2)]
    assert found == [0, 0, 0, 0, 1, 1, 2, 2]
    entries = Entries(find_generator("1f1b-async")(Place(0, 3, 3, 2)))
    assert [entries.take(i, 0) for i in range(4)] == [0, 0, 1, 2]
    assert entries.following == 2
