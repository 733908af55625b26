"""Section of docs/results.md: who is first at a loss, and when asynchrony is not worth it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from table import table

from spectrain_ext.extras import picture
from studies.looks import looks

from .races import METHODS, SHARES, Race, races

_HEADS = [f">{share:.0%}" for share in SHARES]


def section(results: Path) -> str:
    """Tables, the picture, and when a flush wins."""
    found = races(results)
    one = [r for r in found if r.delay == 1]
    more = [r for r in found if r.delay > 1]
    auto = [r for r in one if (r.method, r.workload) == ("auto", "text")]
    shares = ", ".join(f"{share:.0%}" for share in SHARES)
    return f"""## Time to quality

Updates to a loss, counted in the [study](frontier.md), times the time of a minibatch, simulated
from its stages' measured work; over the same of `1f1b`, which is synchronous training with as many
microbatches as stages, and a flush. Below 1 a method is sooner than `1f1b`.

- `minibatch` is the time of one, `loss at` the time to the loss that synchronous training had after
  {shares} of its updates; medians of the seeds, every method at its own best learning rate.
- After ">" half of the seeds did not get there in as many updates as they had: above 1 the method
  has lost, below nobody knows.
- The study's JSON has updates as medians only, so the spread is that of the loss: the gap to
  synchronous training after as many updates, with its 95 % interval over seeds.
- Messages and predictions take no time in it.

![Time to a loss over that of 1f1b, by method and number of stages](results-quality.png)

One update late, as many microbatches as stages:

{compared(one, late=False)}

More than one update late, with fewer microbatches than stages:

{compared(more, late=True)}

### When asynchrony is not worth it

A flush leaves a stage idle for as long as the other stages work on one microbatch: for N - 1
microbatches, where all take as long. The more microbatches share that, the less each pays, while
updates that are needed more stay. From so many microbatches per flush on, `1f1b` is as quick to
the loss on the transformer as `auto` with N of them, if the updates needed stay what they were for
the study's small minibatches ("none": `auto` needs no more updates than synchronous training;
"not known": it did not get there in as many):

{evens(auto)}

So take `1f1b`, or no pipeline:

- **Few stages.** With {auto[0].stages} of them a flush after as many microbatches makes a minibatch
  here {1 + auto[0].bubble:.2f} times as long; doing without it wins no more than that.
- **Many microbatches per update**, as in the table: large minibatches, gradients summed up.
- **More than one update late with AdamW**: the transformer in the second table.
- **Nothing predicted**: `vanilla` on the transformer, in both tables.
- **The last loss wanted**: where ">" stands in its column.
- **Links are quick and the model fits on one device.** Data parallelism has neither bubble nor
  delay; then its gradients are all that it costs."""


def compared(rows: Iterable[Race], *, late: bool) -> str:
    """A line for every race."""
    lines = [
        [
            f"{r.workload},\u00a0{r.stages}",
            f"`{r.method}`",
            *([str(r.microbatches)] if late else []),
            str(r.seeds),
            f"{r.time:.2f}",
            *(r.shown(share).replace(" ", "\u00a0") for share in SHARES),
            f"{100 * r.gap[1]:+.1f}",
            f"{100 * r.gap[0]:+.1f} to {100 * r.gap[2]:+.1f}".replace(" ", "\u00a0"),
        ]
        for r in rows
    ]
    heads = ["data, N", "method", *([">M"] if late else []), ">seeds", ">minibatch"]
    heads += [f">loss at {share:.0%}" for share in SHARES]
    return table("|".join([*heads, ">gap %", "95 % interval"]), lines)


def evens(auto: Iterable[Race]) -> str:
    """The break-even table, for the stages as they were and for equal ones."""
    lines = [
        [
            *(str(r.stages), f"{r.idle:.1f}"),
            *(r.even(share, r.idle) for share in SHARES),
            *(r.even(share, r.stages - 1) for share in SHARES),
        ]
        for r in auto
    ]
    equal = (f"{head}, equal stages" for head in _HEADS)
    return table("|".join([">N", ">idle microbatches", *_HEADS, *equal]), lines)


def draw(results: Path, folder: Path) -> None:
    """Time to two of the losses, by depth; hollow where only a lower bound is known."""
    found = [r for r in races(results) if r.delay == 1]
    places = list(dict.fromkeys((r.workload, r.stages) for r in found))
    look = looks(METHODS)
    with picture(folder / "results-quality.png", 9.0, 3.8) as figure:
        for number, share in enumerate(SHARES[:2]):
            axes = figure.add_subplot(1, 2, number + 1)
            for at, place in enumerate(places):
                beside = [r for r in found if (r.workload, r.stages) == place]
                for index, r in enumerate(beside):
                    axes.plot(
                        at + 0.13 * (index - (len(beside) - 1) / 2),
                        r.to_loss(share),
                        color=look[r.method].color,
                        marker="^" if share in r.beyond else "o",
                        fillstyle="none" if share in r.beyond else "full",
                    )
            axes.axhline(1.0, color="black", linewidth=1.0)
            axes.set_xticks(range(len(places)), [f"{name}\nN = {n}" for name, n in places])
            axes.set_title(f"to the loss at {share:.0%} of the updates", fontsize=10)
            axes.set_ylim(0.4, 1.5)
            axes.grid(True, axis="y", alpha=0.3)
        for method in METHODS:
            axes.plot([], [], "o", color=look[method].color, label=method)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.supylabel("time over that of 1f1b (triangle: or more)", fontsize=9)
