"""Draws the streams and events of a run on three devices.

In tests/: ``python -m helpers.overlap_picture ../docs/overlap.svg``.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import spectrain_ext as st
from spectrain_ext.extras import picture
from spectrain_ext.schedule import Kind

from .recorded_streams import recorded

STAGES, SHOWN = 3, 5  # the minibatch whose events are drawn
#: By kind of work: its name, its duration, and the colors of other timelines.
LOOKS = {
    Kind.FORWARD: ("F", 2, "#0072B2", "white"),
    Kind.BACKWARD: ("B", 4, "#E69F00", "black"),
    Kind.UPDATE: ("U", 1, "black", "white"),  # with the prediction that the next forward reads
    Kind.SEND_ACTIVATION: ("a", 1.5, "#999999", "black"),
    Kind.SEND_GRADIENT: ("g", 1.5, "#999999", "black"),
}


def run():
    """Return the record of a run in its steady state."""
    with recorded(range(STAGES)) as record:
        stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(STAGES)]
        sgd = lambda params: st.optim.SGD(params, lr=0.1, momentum=0.9)  # noqa: E731
        pipe = st.Pipeline(stages, sgd, nn.functional.mse_loss, "spectrain", microbatches=1)
        data = [(torch.ones(2, 4), torch.ones(2, 4))] * 12
        list(pipe.run(data))
        record.train(pipe, data)
    return record


def look(work):
    return LOOKS.get(work.step[1]) if work.step and work.writes else None


def row(work):
    """Return where the row of a work's stream is: predictions, computation, copies of a stage."""
    k, kind, *_ = work.step
    if kind is Kind.SEND_GRADIENT:
        k -= 1
    within = {Kind.SEND_ACTIVATION: 2, Kind.SEND_GRADIENT: 3}
    return 4 * k + within.get(kind, int("compute" in work.lane.name))


def events(order, work):
    """Yield the works on other streams that this one waits for, unless another wait implies it."""
    for other in work.after:
        implied = any(order[third] >> other.number & 1 for third in work.after)
        if look(other) and row(other) != row(work) and not implied:
            yield other


def draw(path):
    record = run()
    times = record.times(lambda work: (look(work) or (0, 0))[1])
    works = [work for work in record.works if look(work)]
    shown = [work for work in works if work.step[2] == SHOWN]
    begin, end = times[shown[0]][0] - 4, max(times[work][1] for work in shown)
    works = [work for work in works if times[work][0] < end - 0.5 and times[work][1] > begin + 0.5]
    names = {row(work): work.lane.name.removeprefix("copy stream of ") for work in works}
    at = {row: n for n, row in enumerate(sorted(names))}
    with picture(path, 11, 4.2) as figure:
        axes = figure.add_subplot()
        for work in works:
            start, stop = max(times[work][0], begin), min(times[work][1], end)
            name, _, color, ink = look(work)
            alpha, ink = (1, ink) if work in shown else (0.2, "black")
            axes.barh(at[row(work)], stop - start, 0.8, start, color=color, alpha=alpha, ec="white")
            where, name = ((start + stop) / 2, at[row(work)]), f"{name}{work.step[2]}"
            axes.text(*where, name, color=ink, ha="center", va="center_baseline", fontsize=8)
        order = record.order()
        for work in shown:
            for other in events(order, work):
                tip, begins = (times[work][0], at[row(work)]), (times[other][1], at[row(other)])
                arrow = {"arrowstyle": "->", "color": "#D55E00"}
                axes.annotate("", tip, begins, arrowprops=arrow)
        axes.set_yticks(list(at.values()), [names[row] for row in at], fontsize=8)
        axes.set(xlim=(begin, end), ylim=(len(at) - 0.4, -0.6), xlabel="time", xticks=[])
        axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    draw(sys.argv[1])
