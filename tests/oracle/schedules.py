"""Writes out each stage's order of actions, and counts its updates.

F(i, j) is the forward of microbatch j of minibatch i, B(i, j) its backward, U(i) the update. If
there are W(i, j), B(i, j) is the gradient of only the input and W(i, j) that of the weights.
"""

from __future__ import annotations

from functools import cache

FLUSHING = ("gpipe", "1f1b", "zb-h1", "interleaved")
CHUNKED = ("interleaved", "interleaved-async", "wpipe")  # several stages per device


def order(schedule, k, n, window, m, parts):
    """Return the actions of stage k of n; minibatch i has ``parts[i]`` microbatches (1 to m)."""
    if schedule == "1f1b-async":
        return asynchronous(window, m, parts)
    if schedule in ("interleaved", "interleaved-async"):
        return interleaved(k, n, m, parts, schedule == "interleaved")
    if schedule == "wpipe":
        return moved(k, n, m, parts) if k < n // 2 else flushing(n - k, parts)
    if schedule == "zb-h1-async":
        return at_once(asynchronous(window, m, parts))
    if schedule == "zb-h1":
        return zero_bubble(k, n, parts)
    return flushing(m if schedule == "gpipe" else n - k, parts)  # GPipe: all forwards first


def asynchronous(window, m, parts):
    """``window`` forwards, then backward and forward in turn, across minibatches.

    A minibatch with fewer samples than microbatches leaves its last places empty.
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


def megatron(p, device, v, microbatches):
    """Return a device's actions, of p with v chunks, as ("F", chunk, microbatch).

    Narayanan et al., arXiv 2104.04473, section 2.2, and the order of Megatron-LM's
    ``forward_backward_pipelining_with_interleaving``: p microbatches in a chunk, then in the next;
    (p - device - 1)*2 + (v - 1)*p forwards, a forward and a backward in turn, backwards.
    """

    def numbered(kind, number):
        rounds, rest = divmod(number, p * v)
        chunk, at = divmod(rest, p)
        return kind, chunk if kind == "F" else v - 1 - chunk, rounds * p + at

    total = microbatches * v
    warmup = min(total, (p - device - 1) * 2 + (v - 1) * p)
    for number in range(total + warmup):
        if number < total:
            yield numbered("F", number)
        if number >= warmup:
            yield numbered("B", number - warmup)


def interleaved(k, n, m, parts, flush):
    """Return a stage's part of its device's actions, with two stages per device.

    Microbatches that only complete the last round do not exist. Without a flush all minibatches are
    one.
    """
    v = min(2, n)
    p = -(-n // v)
    chunk, device = divmod(k, p)
    for first in range(len(parts)) if flush else [0]:
        count = m if flush else m * len(parts)
        for kind, c, q in megatron(p, device, v, -(-count // p) * p):
            i, j = first + q // m, q % m
            if c != chunk or q >= count:
                continue
            if j < parts[i]:
                yield kind, i, j
            if kind == "B" and j == m - 1:
                yield "U", i, None


def moved(k, n, m, parts):
    """WPipe's first group: the next minibatch's forwards precede this one's backwards (1F1B)."""
    for j in range(parts[0] if parts else 0):
        yield "F", 0, j
    ahead = min(m, n // 2 - k)
    for i in range(len(parts)):
        for q in range(m + ahead):
            if q >= ahead and q - ahead < parts[i]:
                yield "B", i, q - ahead
            if i + 1 < len(parts) and q < min(m, parts[i + 1]):
                yield "F", i + 1, q
        yield "U", i, None


@cache
def counted(schedule, k, n, m):
    """Return (maximum microbatches in flight, maximum updates from a forward to its backward)."""
    parts = [m] * (4 * n // m + 8)
    actions = list(order(schedule, k, n, None, m, parts))
    reads, meets = updates_before(actions, "F"), updates_before(actions, "B")
    return most_in_flight(actions), max(meets[x] - reads[x] for x in reads)


def zero_bubble(k, n, parts):
    """ZB-H1: every stage holds n microbatches, n - k before their B, as 1F1B, and k before their W.

    A W comes k microbatches after its B, or after the last B as soon as possible.
    """
    for i, count in enumerate(parts):
        backwards = 0
        for what, _, j in flushing(n - k, [count]):
            if what == "U":
                break
            yield what, i, j
            if what == "B":
                backwards += 1
                if backwards > k:
                    yield "W", i, backwards - k - 1
        for j in range(max(0, count - k), count):
            yield "W", i, j
        yield "U", i, None


def at_once(actions):
    """Put every W right after its B."""
    for what, i, j in actions:
        yield what, i, j
        if what == "B":
            yield "W", i, j


def ends_of(actions):
    """Return the microbatches as their backwards end: at W if there are any, else at B."""
    what = "W" if any(action[0] == "W" for action in actions) else "B"
    return [(i, j) if kind == what else None for kind, i, j in actions]


def updates_before(actions, kind):
    """Return (i, j) -> the stage's updates before this F or B."""
    updates, found = 0, {}
    for what, i, j in actions:
        if what == "U":
            updates += 1
        elif what == kind:
            found[i, j] = updates
    return found


def most_in_flight(actions):
    """Return the maximum number of microbatches between their forward and backward."""
    now = most = 0
    actions = list(actions)
    for (what, _, _), ended in zip(actions, ends_of(actions), strict=True):
        now += (what == "F") - (ended is not None)
        most = max(most, now)
    return most
