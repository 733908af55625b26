"""What runs here: versions of packages, the processor's name, threads."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch


def installed(*packages: str) -> dict[str, str]:
    """The versions of those that are."""
    found = {}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def cpu_name() -> str:
    """As the system calls it, with family and model where they tell processors apart."""
    path = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields:
        name += f", family {fields['cpu family']} model {fields.get('model', '?')}"
    return name


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside, torch computes with so many threads on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
