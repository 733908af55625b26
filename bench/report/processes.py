"""Section of docs/results.md: processes against the ideal and rivals, and what was tried."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from table import listed, span, table

FOLDER = "2026-11-24-processes"
#: What was tried on the way there.
TRIALS = "2026-11-22-throughput"

_NAMES = {
    "1F1B": "`1f1b`",
    "GPipe": "`gpipe`",
    "torch 1F1B": "torch.distributed.pipelining 1F1B",
    "torch GPipe": "torch.distributed.pipelining GPipe",
    "replicas": "one stage with replicas",
    "DDP": "DistributedDataParallel",
}
_WITH_M = ("auto", "spectrain", *_NAMES)
_TARGET = 0.95

#: Trials by their names in the JSON: what was changed, and what it costs beside time.
_TRIED = {
    "window 3, 1": "the wide window, 3 and 1: twice the staleness on stage 0",
    "window 3, 2": "a window of 3 and 2 (N - k + 1): more staleness on both stages",
    "window 4, 2": "a window of 4 and 2: still more",
    "the ideal with a core for each rank": "the ideal itself, all threads of a rank on one core",
    "a core for each rank": "all threads of a rank on one core of its own",
    "a core for each rank's own thread": "only the thread that computes, and what it starts",
    "gloo's threads on the other core": "gloo's progress threads off the core that computes",
    "16 more idle groups": "16 groups of gloo that nobody uses: what its waking threads cost",
    "split backward": "the gradient of the input sent before those of the weights",
    "split backward, all at once": "the same functions, nothing sent earlier: its control",
    "messages sent by a thread": "messages sent by a thread, after one copy more",
    "batches not compared": "batches of two loaders not compared, as they were then",
}

Figures = dict[str, list[float]]


def section(results: Path) -> str:
    """Medians of ratios within rounds, with their ranges."""
    run = json.loads((results / FOLDER / "measured.json").read_text())
    tried = json.loads((results / TRIALS / "trials.json").read_text())
    parts = [_opening(run), _by_ranks(run), _two(results, run["ranks"]["2"])]
    return "\n\n".join([*parts, _where(tried), _trials(tried)])


def _over(figures: Figures, above: str, below: str) -> list[float]:
    """Ratios round by round: what disturbs a round disturbs all of it."""
    return [a / b for a, b in zip(figures[above], figures[below], strict=True)]


def _opening(run: dict[str, Any]) -> str:
    counts = [int(n) for n in run["ranks"]]
    rounds = {n: len(run["ranks"][str(n)]["microbatches_per_second"]["ideal"]) for n in counts}
    cut = ", ".join(f"{n} stages of {run['ranks'][str(n)]['blocks']}" for n in counts)
    return f"""## Throughput of processes

Measured with `{run["command"]}` on {run["date"]}: {run["cpu"]}, {run["cores"]} cores, one thread a
process, gloo over loopback, torch {run["torch"]}
([figures](../bench/results/{FOLDER}/measured.json)). One model of linear layers and tanh is cut
into {cut} blocks; a microbatch has {run["ranks"]["2"]["options"]["batch"]} samples everywhere.
Every candidate is measured once in each of {span(rounds.values())} rounds; a figure is
the median of the rounds' ratios to the ideal, and their range. The ideal is a stage that waits for
nobody, sends nothing, predicts nothing, and makes an update per microbatch, on all ranks at once:
with more ranks than cores it is what the shared cores can do at most. What updates only after M
microbatches saves updates that the ideal makes, and can be above it."""


def _by_ranks(run: dict[str, Any]) -> str:
    counts = [int(n) for n in run["ranks"]]
    figures: dict[int, Figures] = {
        n: run["ranks"][str(n)]["microbatches_per_second"] for n in counts
    }

    def line(label: str, name: Callable[[int], str]) -> list[str]:
        return [label, *(_share(figures[n], name(n)) for n in counts)]

    def fixed(name: str) -> Callable[[int], str]:
        return lambda n: name

    def with_m(name: str, times: int) -> Callable[[int], str]:
        return lambda n: f"{name}, M = {times * n}"

    lines = [
        line("`vanilla`", fixed("vanilla")),
        line("`spectrain`", fixed("spectrain")),
        line("`pipedream`", fixed("pipedream")),
        line("`spectrain`, wide window", fixed("spectrain, wide window")),
    ]
    for times, m in ((1, "N"), (2, "2N")):
        for name in _WITH_M:
            lines.append(line(f"{_NAMES.get(name, f'`{name}`')}, M = {m}", with_m(name, times)))
    head = "|".join(["of the ideal", *(f">N = {n}" for n in counts)])

    def against(method: str) -> str:
        found = []
        for n in counts:
            ratios = _over(figures[n], f"{method}, M = {n}", f"torch 1F1B, M = {n}")
            found.append(f"{median(ratios):.2f} with {n}")
        return listed(found)

    return f"""{table(head, lines)}

With as many updates (M = N) the throughput over that of torch's 1F1B is of `auto`
{against("auto")} processes, of `spectrain` {against("spectrain")}."""


def over_torch(results: Path) -> str:
    """How many times as fast as torch's 1F1B ``auto`` is, with as many microbatches: a range."""
    run = json.loads((results / FOLDER / "measured.json").read_text())
    found = [
        _median(figures, name, f"torch 1F1B, M = {name.partition(' = ')[2]}")
        for figures in (each["microbatches_per_second"] for each in run["ranks"].values())
        for name in figures
        if name.startswith("auto, M = ")
    ]
    return f"{min(found):.2f} to {max(found):.2f} times"


def _share(figures: Figures, name: str) -> str:
    if name not in figures:
        return "not measured"
    shares = _over(figures, name, "ideal")
    return f"{_percent(median(shares))} ({100 * min(shares):.0f} to {100 * max(shares):.0f})"


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def _two(results: Path, run: dict[str, Any]) -> str:
    """By the number of microbatches, and what was to be reached."""
    return f"""### Two processes

{two_processes(results)}

Freed memory was kept for all candidates (`bench/heap.py`).
{_targets(run["microbatches_per_second"])}"""


def _median(figures: Figures, above: str, below: str) -> float:
    return median(_over(figures, above, below))


def two_processes(results: Path) -> str:
    """A table: M of one row go together, as their figures do."""
    run = json.loads((results / FOLDER / "measured.json").read_text())["ranks"]["2"]
    figures: Figures = run["microbatches_per_second"]
    rows: dict[str, list[str]] = {}
    for name in figures:
        first, comma, rest = name.partition(", M = ")
        if name != "ideal":
            rows.setdefault(f"{first}{comma and ', M'}", []).append(rest)
    lines = []
    for row, ms in rows.items():
        first, comma, _ = row.partition(", M")
        names = [f"{first}, M = {m}" if comma else first for m in ms]
        label = _NAMES.get(
            first, f"`{first.partition(',')[0]}`{first[len(first.partition(',')[0]) :]}"
        )
        same = [f"spectrain, M = {m}" for m in ms]
        lines.append(
            [
                f"{label}, M = {', '.join(ms)}" if comma else label,
                ", ".join(f"{_median(figures, name, 'ideal') * 100:.0f}" for name in names) + " %",
                ", ".join(f"{_median(figures, 'spectrain', name):.2f}" for name in names),
                ", ".join(
                    f"{_median(figures, like, name):.2f}"
                    for like, name in zip(same, names, strict=True)
                    if like in figures
                ),
            ]
        )
    return table("|of the ideal|`spectrain` over it|with as many updates, over it", lines)


def _targets(figures: Figures) -> str:
    """What was to be reached, each with its figure."""

    def said(what: str, value: str, reached: bool) -> str:
        return f"{what} ({'reached' if reached else 'missed'}: {value})"

    ideal = _median(figures, "spectrain", "ideal")
    vanilla = _median(figures, "spectrain", "vanilla")
    first = _median(figures, "spectrain", "torch 1F1B, M = 2")
    ahead = {
        m: _median(figures, f"spectrain, M = {m}", f"torch 1F1B, M = {m}") for m in (2, 4, 8, 16)
    }
    words = [
        said(f"{_percent(_TARGET)} of the ideal", _percent(ideal, 1), ideal >= _TARGET),
        said("97 % of `vanilla`", _percent(vanilla, 1), vanilla >= 0.97),
        said("1.3 times torch's 1F1B at M = 2", f"{first:.2f}", first >= 1.3),
        said(
            "to be ahead of it at M = 2, 4, 8 and 16 with as many updates",
            ", ".join(f"{ratio:.2f}" for ratio in ahead.values()),
            min(ahead.values()) >= 1.0,
        ),
    ]
    return f"To be reached were {listed(words)}."


def _where(tried: dict[str, Any]) -> str:
    """A table of what the kernel counted, for the slower rank of each."""

    def cells(name: str) -> list[str]:
        found = [rank[name] for rank in tried["profiles"]]
        ranks = []
        for key in ("period", "own", "gloo", "waited for a core", "waited for a message"):
            values = [of["cpu"].get(key) if key in ("own", "gloo") else of.get(key) for of in found]
            ranks.append("" if None in values else ", ".join(f"{v:.1f}" for v in values))
        faults = ", ".join(f"{of['page faults']:.0f}" for of in found)
        return [f"`{name}`" if name != "ideal" else "the ideal", *ranks, faults]

    head = table(
        "ms a minibatch, rank 0 and 1|>period|>its own thread|>gloo's threads|>waited for a core"
        "|>waited for a message|>page faults",
        [cells(name) for name in ("ideal", "vanilla", "spectrain")],
    )
    own = [rank["spectrain"]["actions"] for rank in tried["profiles"]]
    kinds = list(dict.fromkeys(kind for rank in own for kind in rank))
    actions = table(
        "|".join(["`spectrain`, ms", *(f">{kind.lower().replace('_', ' ')}" for kind in kinds)]),
        [
            [
                f"rank {rank}",
                *(f"{found[kind]:.2f}" if kind in found else "" for kind in kinds),
            ]
            for rank, found in enumerate(own)
        ],
    )
    return f"""### Where a minibatch's time goes

By the kernel's counts per thread and a `Trace`, in a run of {2 * tried["options"]["count"]}
minibatches each ([figures](../bench/results/{TRIALS}/trials.json)):

{head}

{actions}"""


def _trials(tried: dict[str, Any]) -> str:
    figures: Figures = tried["microbatches_per_second"]
    lines = []
    for name, what in _TRIED.items():
        if name not in figures:
            continue
        ratios = _over(figures, name, "spectrain")
        low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        simulated = tried["simulated"].get(name)
        lines.append(
            [
                what,
                _percent(_median(figures, name, "ideal"), 1),
                f"{middle:.3f} ({low:.3f} to {high:.3f})",
                "" if simulated is None else f"{simulated:.3f}",
                _verdict(low, middle, high),
            ]
        )
    head = table(
        "what was changed|>of the ideal|>over plain `spectrain`|>simulated|it gives", lines
    )
    shares = {
        name: _percent(_median(figures, name, "ideal"), 1) for name in ("vanilla", "spectrain")
    }
    update = [
        _percent(rank["spectrain"]["actions"]["UPDATE"] / rank["spectrain"]["period"])
        for rank in tried["profiles"]
    ]
    return f"""### What was tried

{_heap(tried["heaps"])}

The rest with freed memory kept, candidates beside each other in
{len(figures["ideal"])} rounds, medians and quartiles of the rounds' ratios; plain `spectrain` has
{shares["spectrain"]} of the ideal in them, `vanilla` {shares["vanilla"]}. Simulated are the mean
durations of this run, which do not vary there: what is above 1 would come without variation too.

{head}

The update with its prediction takes {update[0]} and {update[1]} of a minibatch on the two ranks.
It was not cut into chunks: gradients and activations are sent before it, and travel meanwhile."""


def _verdict(low: float, middle: float, high: float) -> str:
    """A change of 2 % or more counts, where it is larger than most rounds differ."""
    if middle >= 1.02 and low > 1.0:
        return "throughput"
    return "a loss" if middle <= 0.98 and high < 1.0 else "nothing that this run could see"


def _heap(heaps: dict[str, list[dict[str, Any]]]) -> str:
    lines = []
    for how, runs in heaps.items():
        cells, figures = [how], [run["microbatches_per_second"] for run in runs]
        for name in ("ideal", "vanilla", "spectrain", "pipedream"):
            values = [value for of in figures for value in of[name]]
            cells.append(f"{median(values):.1f}")
        shares = [
            share
            for run in runs
            for share in _over(run["microbatches_per_second"], "spectrain", "ideal")
        ]
        faults = [rank["spectrain"]["page faults"] for run in runs for rank in run["profiles"]]
        cells += [_percent(median(shares), 1), f"{min(faults):.0f} to {max(faults):.0f}"]
        lines.append(cells)
    head = table(
        "freed memory|>the ideal|>`vanilla`|>`spectrain`|>`pipedream`|>`spectrain` of the ideal"
        "|>page faults a minibatch",
        lines,
    )
    return f"""Freed memory: glibc gives what a minibatch frees (gradients, activations) back to the
system, and takes it again page by page, in some processes and not in others, by what lies above it
in the heap. Having it kept (`mallopt`) concerns the whole process and is not in the package: this
run had few page faults either way. Microbatches a second
in {len(next(iter(heaps.values())))} pairs of runs that took turns, medians; the ideal and rivals in
the same process have it kept as well:

{head}"""
