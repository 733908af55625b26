"""Counts the weight versions that a stage needs, from the definitions alone."""

from __future__ import annotations

from oracle.methods import METHODS, local
from oracle.schedules import ends_of, order, updates_before


def most_versions(method, k, n, windows, m):
    """Return the maximum number of distinct weights of stage k that must exist at once.

    These are the true ones, those in use, those that a backward in flight reads again, versions
    that later forwards read, and a prediction that a step has written.
    """
    definition = METHODS[method]
    parts = [m] * (2 * max(windows) // m + 8)
    orders = [list(order(definition.schedule, x, n, windows[x], m, parts)) for x in (0, k)]
    reads = updates_before(orders[0 if definition.reads == "entry" else 1], "F")
    place = (k, n, windows[k], m)
    lead = definition.lead(*place, local(0, n, windows[0], m))

    def forward(i, j):
        if definition.reads == "previous":
            u = max(0, i - 1)
        else:
            u = reads[i, 0 if definition.once else j]
        rule = definition.forward
        s = i - u if rule == "counted" else rule(*place)
        if definition.law == "second-order":
            return (u, s + lead) if u else (u, 0)
        if definition.law == "difference":  # nothing moves before the first update
            return (u, s if u else 0)
        return (u, s)

    def backward(i, j):
        if definition.backward == "stash":
            return forward(i, j)
        s = definition.backward_horizon(*place) if definition.backward == "predict" else 0
        if definition.law == "second-order" and s:  # its backward is linear
            return (i, s, "linear")
        return (i, -s if definition.law == "average" else s)

    # Both the forward's and the backward's weights stay while they are of the newest version,
    # unless an update comes between two predicted ones.
    both = definition.backward == "predict" and definition.backward_horizon(*place) > 0
    both = definition.backward != "stash" and not (
        m == 1 and both and definition.reads == "newest" and definition.law != "second-order"
    )
    last = {}
    actions, most, updates, flying, begun = orders[1], 0, 0, [], set()
    ended = ends_of(actions)
    for position, (what, i, j) in enumerate(actions):
        if what == "U":
            updates, last = updates + 1, {}
            if definition.law == "second-order":  # the step writes it for any reader
                s = definition.forward(*place) + lead
                kept = {forward(*microbatch) for microbatch in flying}
                most = max(most, len({(updates, s), (updates, 0)} | kept))
            continue
        working = forward(i, j) if what == "F" else backward(i, j)
        if what == "F":
            flying.append((i, j))
            begun.add((i, j))
        held = {working, (updates, 0)}
        if both and working[0] == updates:
            last[what] = working
        held.update(last.values())
        if definition.backward == "stash":
            held |= {forward(*microbatch) for microbatch in flying}
        for later, x, y in actions[position + 1 :]:
            if later == "F":
                wanted = forward(x, y)
                if wanted[0] <= updates and definition.reads != "newest":
                    # An older one is as it will be read; the newest can still be predicted.
                    held.add(wanted if wanted[0] < updates else (updates, 0))
                if definition.once and (x, 0) in begun:
                    held.add(wanted)
        if definition.law == "difference" and definition.forward(*place) and updates:
            held.add((updates - 1, 0))
        if definition.law == "average" and definition.backward_horizon(*place) and updates:
            held.add("the average")
        most = max(most, len(held))
        if ended[position] is not None:
            flying.remove((i, j))
    return most
