"""Records the machine and the versions, which figures are meaningless without."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from spectrain_ext import _C
from spectrain_ext.files import finite
from spectrain_ext.threads import cores
from spectrain_ext.tools.commands.doctor import cpu_name, installed


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return device, versions and date, without paths and host names."""
    build = _C.build_info()
    info: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": "cpu" if device == "cpu" else "cuda",
        "cpu": cpu_name(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": importlib.metadata.version("numpy"),
        "spectrain_ext": build["version"],
        "instruction_set": build["cpu_instruction_set"],
    }
    info |= installed("triton", "cupy-cuda13x", "cupy-cuda12x")
    if hasattr(os, "getloadavg"):
        info["load_before"] = round(os.getloadavg()[0], 2)
    if device != "cpu":
        p = torch.cuda.get_device_properties(device)
        info["gpu"] = p.name
        info["capability"] = f"{p.major}.{p.minor}"
        info["l2_bytes"] = getattr(p, "L2_cache_size", None)
        info["cuda"] = torch.version.cuda
    return info


def save(path: Path, document: dict[str, Any]) -> None:
    """Write a document as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(finite(document), indent=1) + "\n")


def free_bytes(device: str = "cpu") -> int:
    if device != "cpu":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 2**32
