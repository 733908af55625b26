"""In which order one stage works, written out action by action, and what counting its updates says.

F(i, j) is the forward of microbatch j of minibatch i, B(i, j) its backward, U(i) the update.
"""

from __future__ import annotations


def order(schedule, k, n, window, m, parts):
    """The actions of stage k of n; of m microbatches, minibatch i has ``parts[i]`` (1 to m)."""
    if schedule == "1f1b-async":
        return asynchronous(window, m, parts)
    return all_forward_all_backward(parts) if schedule == "gpipe" else flushing(n - k, parts)


def asynchronous(window, m, parts):
    """``window`` forwards, then backward and forward in turn, across the ends of minibatches.

    A minibatch with fewer samples than microbatches leaves the places of its last ones empty.
    """
    places = [(i, j) for i in range(len(parts)) for j in range(m)]
    for q in range(len(places) + window):
        if q >= window:
            i, j = places[q - window]
            if j < parts[i]:
                yield "B", i, j
            if j == m - 1:
                yield "U", i, None
        if q < len(places):
            i, j = places[q]
            if j < parts[i]:
                yield "F", i, j


def all_forward_all_backward(parts):
    """GPipe: a minibatch's forwards, its backwards, its update."""
    for i, count in enumerate(parts):
        for j in range(count):
            yield "F", i, j
        for j in range(count):
            yield "B", i, j
        yield "U", i, None


def flushing(window, parts):
    """1F1B with a flush: ``window`` forwards, backward and forward in turn, then backwards."""
    for i, count in enumerate(parts):
        ahead = min(count, window)
        for j in range(ahead):
            yield "F", i, j
        for j in range(count):
            yield "B", i, j
            if ahead + j < count:
                yield "F", i, ahead + j
        yield "U", i, None


def updates_before(actions, kind):
    """(i, j) -> the updates that the stage has made when it does this F or B."""
    updates, found = 0, {}
    for what, i, j in actions:
        if what == "U":
            updates += 1
        elif what == kind:
            found[i, j] = updates
    return found


def most_in_flight(actions):
    """The most microbatches whose forward is done and whose backward is not."""
    now = most = 0
    for what, _, _ in actions:
        now += {"F": 1, "B": -1, "U": 0}[what]
        most = max(most, now)
    return most
