"""Simulated throughput on 4 to 1,024 devices, and the bytes that decide it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from table import table

FOLDER = "2026-11-22-throughput"

_DP = "data parallelism"
_AUTO = "auto, one update late"
_CONTENDERS = ("1F1B", "SpecTrain", _AUTO)
_SHOWN = (4, 64, 1024)
_TITLES = {
    "vgg16": "VGG16",
    "resnet50": "ResNet-50",
    "resnet152": "ResNet-152",
    "gpt2": "GPT-2 small",
}
_LINKS = {"pcie3": "PCIe 3", "nvlink": "NVLink", "100gbe": "100 Gb/s Ethernet"}

Row = dict[str, Any]


def _read(results: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / FOLDER / name).read_text())
    return found


def assumed(results: Path) -> str:
    """The devices that are assumed."""
    lines = [
        [
            name,
            f"{a['peak'] / 1e12:.0f}",
            f"{100 * a['efficiency']:.0f} %",
            f"{a['bandwidth'] / 1e9:,.0f}",
            f"{a['memory'] / 1e9:.0f}",
            a["source"],
        ]
        for name, a in _read(results, "ratios.json")["assumed"].items()
    ]
    heads = "device|>peak TFLOP/s|>reached|>memory GB/s|>GB|source (except for the share reached)"
    return table(heads, lines)


def traffic(results: Path) -> str:
    """Bytes of gradients against bytes of activations, and what they make of the throughput."""
    document = _read(results, "ratios.json")
    old, new = document["assumed"]
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
        for row in sorted(document["rows"], key=lambda row: -row["ratio"])
    ]
    return table(
        "model|>parameters, millions|minibatch|>gradients MB|>activations MB|>ratio"
        f"|>{old}, ring|>{old}, central|>{new}, ring",
        lines,
    )


def section(results: Path) -> str:
    """Samples per second over those of data parallelism, on 4, 64 and 1,024 devices."""
    document = _read(results, "simulated.json")
    rows, lines = document["rows"], []
    for device in document["assumed"]:
        for model in _models(rows):
            for link, title in _LINKS.items():
                relative = _relative(rows, device, model, link)
                cells = (
                    ", ".join(
                        f"{of[n]:.2f}" if n in (of := relative.get(name, {})) else "-"
                        for n in _SHOWN
                    )
                    for name in _CONTENDERS
                )
                lines.append([device, _TITLES[model], title, *cells])
    heads = (f">{name}" for name in _CONTENDERS)
    return table("|".join(["device", "model", "link", *heads]), lines)


def _gains(results: Path, over: str) -> list[float]:
    """Throughput of `auto` one update late over another contender's, in all cases with both."""
    document, found = _read(results, "simulated.json"), []
    rows = document["rows"]
    for device in document["assumed"]:
        for model in _models(rows):
            for link in _LINKS:
                relative = _relative(rows, device, model, link)
                others = relative.get(over, {})
                found += [
                    ours / (1.0 if over == _DP else others[n])
                    for n, ours in relative.get(_AUTO, {}).items()
                    if over == _DP or n in others
                ]
    return found


def ahead(results: Path, over: str) -> str:
    """In how many cases `auto` is more than 2 % ahead."""
    gains = _gains(results, _DP if over == "dp" else over)
    return f"{sum(gain > 1.02 for gain in gains)} of {len(gains)}"


def behind(results: Path, over: str) -> str:
    """In how many it is more than 2 % behind."""
    gains = _gains(results, _DP if over == "dp" else over)
    return f"{sum(gain < 0.98 for gain in gains)}"


def reach(results: Path, over: str) -> str:
    """The least and the largest of its gains."""
    gains = _gains(results, _DP if over == "dp" else over)
    return f"{min(gains):.2f} to {max(gains):.2f} times"


def _models(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def _relative(rows: list[Row], *where: str) -> dict[str, dict[int, float]]:
    """Return throughput over data parallelism's where both fit, by contender and devices."""
    mine = [row for row in rows if (row["device"], row["model"], row["link"]) == where]
    base = {r["devices"]: r.get("throughput") for r in mine if r["contender"] == _DP}
    found: dict[str, dict[int, float]] = {}
    for row in mine:
        below = base[row["devices"]]
        if below and row.get("throughput"):
            found.setdefault(row["contender"], {})[row["devices"]] = row["throughput"] / below
    return found
