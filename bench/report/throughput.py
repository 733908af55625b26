"""Section of docs/results.md: simulated throughput to 1,024 devices, and the bytes behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from table import listed, table

from spectrain_ext.extras import picture

FOLDER = "2026-11-22-throughput"
#: The paper's headline (arXiv 1809.02839, abstract): over data parallelism, on four GPUs.
PUBLISHED, DEVICES = 8.91, 4

_DP = "data parallelism"
_AUTO = "auto, one update late"
_SHOWN = (4, 64, 1024)
_TITLES = {
    "vgg16": "VGG16",
    "resnet50": "ResNet-50",
    "resnet152": "ResNet-152",
    "gpt2": "GPT-2 small",
}
_LINKS = {"pcie3": "PCIe 3", "nvlink": "NVLink", "100gbe": "100 Gb/s Ethernet"}
_COLORS = {  # Okabe and Ito's
    _DP: "#000000",
    "GPipe": "#56B4E9",
    "1F1B": "#0072B2",
    "PipeDream": "#E69F00",
    "SpecTrain": "#D55E00",
    _AUTO: "#009E73",
}


def section(results: Path) -> str:
    """Where the paper's figure comes from, and what the simulation says of today's models."""
    ratios, simulated = (
        json.loads((results / FOLDER / name).read_text())
        for name in ("ratios.json", "simulated.json")
    )
    parts = ["## Simulated throughput", _assumed(ratios), *_origin(ratios), *_many(simulated)]
    return "\n\n".join(parts)


def _assumed(document: dict[str, Any]) -> str:
    lines = [
        [
            name,
            f"{a['peak'] / 1e12:.0f}",
            f"{100 * a['efficiency']:.0f} %",
            f"{a['bandwidth'] / 1e9:,.0f}",
            f"{a['memory'] / 1e9:.0f}",
            a["source"],
        ]
        for name, a in document["assumed"].items()
    ]
    heads = "assumed|>TFLOP/s|>of these reached|>GB/s of memory|>GB|source (but for the share)"
    return f"""\
Everything in this section is **simulated** or **counted**; no such device was there:

{table(heads, lines)}

Links have the bandwidth of their standards. Data parallelism sums gradients by a ring, or by two
trees where that is less, in pieces beside the backward, as `DistributedDataParallel` and the engine
do."""


def _origin(document: dict[str, Any]) -> list[str]:
    rows = document["rows"]
    old, new = document["assumed"]

    reach = [r["title"] for r in rows if r["on"][old]["speedup_central"] >= PUBLISHED]
    most = max(rows, key=lambda row: float(row["on"][old]["speedup"]))
    memory = document["assumed"][old]["memory"]
    large = [row["title"] for row in rows if 16 * row["parameters"] > memory]
    said = [
        f"""\
- **On the {old}, {listed(reach) or "no model"} comes to a factor of
  {PUBLISHED}**, and with a central sum only; a ring beside the backward leaves
  {most["on"][old]["speedup"]:.1f} of it. The abstract, which is what we have of the paper, does not
  say which of its models the figure is of; wide layers and small inputs are what can give it.""",
        f"""\
- **More bytes are not enough.** On the {old} a ring beside the backward hides most of those of
  gradients: below 1 a model would train faster in data parallelism, where it fits, since four
  stages are never quite equal.""",
        f"""\
- **Faster devices bring it back.** The {new} computes
  {_faster(document, old, new):.0f} times as fast over the same PCIe 3.""",
    ]
    if large:
        said.append(
            f"- **Memory**: {listed(large)} with gradients, momentum and working weights take "
            f"more than one {old} has (16 bytes a parameter). There the question is not how much "
            "faster a pipeline is."
        )
    slower, waited = f"{PUBLISHED / DEVICES:.1f}", f"{PUBLISHED - 1:.1f}"
    parts = max(row["microbatches"] for row in rows)
    return [
        f"### Where a factor of {PUBLISHED} can come from",
        f"""\
The paper's abstract has up to {PUBLISHED} times the throughput of data parallelism on
{DEVICES} GPUs (**published**). {DEVICES} devices do at most {DEVICES} times the work of one: so
data parallelism was {slower} times *slower* there than a single GPU would have been, and waited for
the sum of gradients at least {waited} times as long as it computed. That is a matter of bytes: of
gradients, which data parallelism exchanges for every minibatch, against activations and their
gradients, which pass the busiest cut of a pipeline.""",
        _ratio_table(rows, (old, new)),
        f"""\
*Gradients* are what each of four devices sends and receives for a minibatch in a ring, in float32;
*activations* what passes the busiest cut of four balanced stages in both directions; both
**counted**. The last columns are periods of data parallelism over that of `auto` in four stages
with {parts} microbatches, over PCIe 3, **simulated** from operations. *Central*: gradients are
gathered on one device and weights sent from there, beside nothing else, as by a parameter server
on one link.""",
        "\n".join(said),
    ]


def _faster(document: dict[str, Any], old: str, new: str) -> float:
    reached = {name: a["peak"] * a["efficiency"] for name, a in document["assumed"].items()}
    return float(reached[new] / reached[old])


def _ratio_table(rows: list[dict[str, Any]], devices: tuple[str, str]) -> str:
    old, new = devices
    lines = [
        [
            row["title"],
            f"{row['parameters'] / 1e6:,.0f}",
            f"{row['batch']} of {row['sample']}",
            *(f"{row[key] / 1e6:,.0f}" for key in ("exchanged_bytes", "passed_bytes")),
            f"{row['ratio']:.3g}",
            f"{row['on'][old]['speedup']:.2f}",
            f"{row['on'][old]['speedup_central']:.2f}",
            f"{row['on'][new]['speedup']:.2f}",
        ]
        for row in sorted(rows, key=lambda row: -row["ratio"])
    ]
    return table(
        "model|>parameters, millions|minibatch|>gradients MB|>activations MB|>ratio"
        f"|>{old}, ring|>{old}, central|>{new}, ring",
        lines,
    )


def _many(document: dict[str, Any]) -> list[str]:
    rows = document["rows"]
    shown = ", ".join(f"{n:,}" for n in _SHOWN)
    found = [
        "### 4 to 1,024 devices",
        f"""\
Simulated from layer times that were **measured** on one core of this machine, at two sizes of a
microbatch, and scaled so that the model reaches the assumed operations per second: layers keep
their measured shares, and small microbatches what they lose here, which on a GPU is not the same.
Every contender has the stages, replicas, microbatches and window that are best for it and fit the
device; the minibatch grows with the number of devices. *{_AUTO}* may be no later than one update,
which ended level with synchronous training where it was measured ([frontier](frontier.md));
PipeDream and SpecTrain may.
Figures are samples per second over those of data parallelism, on {shown} devices; a dash stands
where one of the two is too large ([all](../bench/results/{FOLDER}/simulated.json)).""",
    ]
    for device in document["assumed"]:
        found += [f"{device}:", _device_table(rows, device)]
    found.append(_said(rows))
    found.append(
        "![Simulated samples per second over data parallelism's, by the number of devices, for "
        "every model and link](results-throughput.png)"
    )
    return found


Row = dict[str, Any]


def _models(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def _relative(rows: list[Row], *where: str) -> dict[str, dict[int, float]]:
    """By contender and devices: throughput over data parallelism's, where both fit."""
    mine = [row for row in rows if (row["device"], row["model"], row["link"]) == where]
    base = {r["devices"]: r.get("throughput") for r in mine if r["contender"] == _DP}
    found: dict[str, dict[int, float]] = {}
    for row in mine:
        below = base[row["devices"]]
        if below and row.get("throughput"):
            found.setdefault(row["contender"], {})[row["devices"]] = row["throughput"] / below
    return found


def _device_table(rows: list[Row], device: str) -> str:
    names = [name for name in _COLORS if name != _DP]
    lines = []
    for model in _models(rows):
        for link, title in _LINKS.items():
            relative = _relative(rows, device, model, link)
            cells = (
                ", ".join(
                    f"{of[n]:.2f}" if n in (of := relative.get(name, {})) else "-" for n in _SHOWN
                )
                for name in names
            )
            lines.append([_TITLES[model], title, *cells])
    return table("|".join(["model", "link", *(f">{name}" for name in names)]), lines)


def _said(rows: list[Row]) -> str:
    """What asynchrony gives over a flush, and a pipeline over data parallelism, by the figures."""
    flush, parallel = [], []
    for device in dict.fromkeys(row["device"] for row in rows):
        for model in _models(rows):
            for link in _LINKS:
                relative = _relative(rows, device, model, link)
                for n, ours in relative.get(_AUTO, {}).items():
                    parallel.append(ours)
                    if n in relative.get("1F1B", {}):
                        flush.append(ours / relative["1F1B"][n])
    if not flush:
        return ""
    ahead = sum(gain > 1.02 for gain in flush)
    better = sum(gain > 1.02 for gain in parallel)
    worse = sum(gain < 0.98 for gain in parallel)
    return (
        f"*{_AUTO}* is more than 2 % ahead of 1F1B in {ahead} of {len(flush)} cases, by "
        f"{100 * (max(flush) - 1):.0f} % at most. It is more than 2 % ahead of data parallelism in "
        f"{better} of {len(parallel)}, up to {max(parallel):.1f} times, and as much behind in "
        f"{worse}, down to {min(parallel):.2f} times."
    )


def draw(results: Path, folder: Path) -> None:
    """Throughput over data parallelism's, by devices: a row for each device and link."""
    document = json.loads((results / FOLDER / "simulated.json").read_text())
    rows = document["rows"]
    models = _models(rows)
    places = [(device, link) for device in document["assumed"] for link in _LINKS]
    with picture(folder / "results-throughput.png", 2.6 * len(models), 1.9 * len(places)) as figure:
        grid = figure.subplots(len(places), len(models), sharex=True, squeeze=False)
        for line, (device, link) in zip(grid, places, strict=True):
            for axes, model in zip(line, models, strict=True):
                for contender, of in _relative(rows, device, model, link).items():
                    axes.plot(
                        list(of),
                        list(of.values()),
                        color=_COLORS[contender],
                        linewidth=1.5,
                        linestyle="--" if contender in ("GPipe", "PipeDream") else "-",
                        label=contender,
                    )
                axes.set_xscale("log", base=2)
                axes.set_title(f"{_TITLES[model]}, {device}, {_LINKS[link]}", fontsize=8)
                axes.grid(True, alpha=0.3)
            line[0].set_ylabel("over data parallel", fontsize=8)
        for axes in grid[-1]:
            axes.set_xlabel("devices, simulated", fontsize=8)
        figure.legend(
            *grid[0][0].get_legend_handles_labels(),
            frameon=False,
            fontsize=8,
            loc="outside lower center",
            ncols=len(_COLORS) // 2,
        )
